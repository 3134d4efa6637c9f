"""The loops together: bound on lag, no deadlock, nothing lost or trained twice, whatever fails."""

import asyncio
import sys
from pathlib import Path

import pytest

from ullim.errors import RunFailed
from ullim.orchestration.peers import PeerDied
from ullim.records import Score

sys.path.insert(0, str(Path(__file__).parent))
from fakes import FakeNode, Loop, recipe


def run(loop: Loop) -> Loop:
    return asyncio.run(loop.run())


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_takes_every_step_within_the_bound(max_staleness: int) -> None:
    loop = run(Loop(recipe(loop={"steps": 6, "max_staleness": max_staleness})))
    assert [outcome.step for outcome in loop.witness.steps] == [1, 2, 3, 4, 5, 6]
    assert loop.witness.published == [0, 1, 2, 3, 4, 5, 6]
    assert max(loop.lags) <= max_staleness
    assert sorted(loop.trained_positions) == sorted(set(loop.trained_positions))


def test_on_policy_samples_carry_exactly_the_learners_version() -> None:
    loop = run(Loop(recipe(loop={"max_staleness": 0})))
    assert set(loop.lags) == {0}


def test_sync_mode_puts_nodes_to_sleep_while_learners_work() -> None:
    loop = Loop(recipe(loop={"mode": "sync", "max_staleness": 0}))
    step = loop.learners.step
    asleep: list[bool] = []

    async def watched(batch, publication):  # type: ignore[no-untyped-def]
        asleep.extend(node.asleep for node in loop.nodes["node-0"])
        return await step(batch, publication)

    loop.learners.step = watched  # type: ignore[method-assign]
    run(loop)
    assert asleep == [True] * 4
    assert set(loop.lags) == {0}


def test_a_slow_node_never_makes_the_learner_consume_too_old_samples() -> None:
    def node(name: str) -> FakeNode:
        if name != "node-0":
            return FakeNode(name)
        return FakeNode(name, finished=lambda task, started: loop.learners.version >= started + 3)

    loop = Loop(recipe(loop={"steps": 30, "max_staleness": 1}, nodes={"count": 2}), node=node)
    run(loop)
    assert len(loop.witness.steps) == 30
    assert max(loop.lags) <= 1
    assert loop.controller.counters["groups_stale"] > 0  # the slow node's groups did come too late
    assert loop.controller.counters["answers_stale"] == 2 * loop.controller.counters["groups_stale"]


def test_a_stale_prompt_is_asked_again_and_then_given_up() -> None:
    def node(name: str) -> FakeNode:
        return FakeNode(
            name, finished=lambda task, started: task.prompt.position != 0 or loop.learners.version >= started + 2
        )

    loop = Loop(recipe(loop={"steps": 20, "max_staleness": 1, "prompt_retries": 1}), node=node)
    run(loop)
    asked = [position for position, _ in loop.nodes["node-0"][0].rolled]
    assert asked.count(0) == 2
    assert 0 not in loop.trained_positions
    assert loop.controller.counters["prompts_given_up"] == 1


@pytest.mark.parametrize("count", [1, 2])
def test_a_dead_nodes_groups_are_finished_elsewhere_and_it_returns_with_current_weights(count: int) -> None:
    killed_at = []

    def node(name: str) -> FakeNode:
        first = name not in loop.nodes
        # The first node-0 hangs from version 3 on, so that it dies with groups in flight.
        return FakeNode(name, finished=lambda task, started: not (first and name == "node-0" and started >= 3))

    loop = Loop(recipe(loop={"steps": 12, "watchdog_s": 20.0}, nodes={"count": count}), node=node)

    async def scenario() -> None:
        await loop.pool.start()
        running = asyncio.create_task(loop.controller.run())
        victim = loop.nodes["node-0"][0]
        while not any(version >= 3 for _, version in victim.rolled):
            await asyncio.sleep(0)
        killed_at.append(loop.controller.version)
        victim.alive = False
        async with asyncio.timeout(30):
            await running

    asyncio.run(scenario())
    assert len(loop.witness.steps) == 12
    assert len(loop.trained_positions) == len(set(loop.trained_positions)) == 24
    assert max(loop.lags) <= 1
    reborn = loop.nodes["node-0"][1]
    assert reborn.rolled, "the restarted node was given nothing to do"
    assert min(version for _, version in reborn.rolled) >= killed_at[0] - 1
    assert loop.controller.counters["groups_moved"] > 0
    assert any("node-0 died" in note for note in loop.notes)
    assert any("node-0 is back" in note for note in loop.notes)


def test_a_node_that_keeps_dying_ends_the_run_by_name() -> None:
    def stillborn(name: str) -> FakeNode:
        node = FakeNode(name)
        node.fail_receives = 100
        return node

    loop = Loop(recipe(nodes={"restarts": 1}), node=stillborn)
    with pytest.raises(RunFailed, match="node-0"):
        run(loop)


def test_a_node_that_dies_while_it_starts_again_is_counted_and_given_up() -> None:
    launched: list[str] = []

    def node(name: str) -> FakeNode:
        launched.append(name)
        if name == "node-0" and launched.count("node-0") > 1:
            raise PeerDied(name, "out of memory")
        return FakeNode(name)

    loop = Loop(recipe(loop={"steps": 12}, nodes={"count": 2, "restarts": 2}), node=node)

    async def scenario() -> None:
        await loop.pool.start()
        running = asyncio.create_task(loop.controller.run())
        while loop.controller.version < 2:
            await asyncio.sleep(0)
        loop.nodes["node-0"][0].alive = False
        async with asyncio.timeout(30):
            await running

    asyncio.run(scenario())
    assert len(loop.witness.steps) == 12  # the other node carries on
    assert launched.count("node-0") == 3
    assert any("node-0 died for good after 2 restarts" in note for note in loop.notes)


def test_a_failed_transfer_is_tried_again_with_a_restarted_node() -> None:
    first = FakeNode("node-0")
    first.fail_receives = 1
    spare = [first]
    loop = run(Loop(recipe(), node=lambda name: spare.pop() if spare else FakeNode(name)))
    assert len(loop.witness.steps) == 4
    assert any("node-0 died" in note for note in loop.notes)


def test_a_silent_node_ends_the_run_within_the_watchdog_and_says_who_waits() -> None:
    loop = Loop(
        recipe(loop={"watchdog_s": 0.3}), node=lambda name: FakeNode(name, finished=lambda task, started: False)
    )
    with pytest.raises(RunFailed, match=r"(?s)watchdog_s.*slots held.*node-0.*in flight: 0, 1"):
        run(loop)


def test_rewards_that_all_fail_end_the_run_with_their_reason() -> None:
    def node(name: str) -> FakeNode:
        fake = FakeNode(name)
        fake.value = lambda task, member: Score(None, "the service is down")
        return fake

    with pytest.raises(RunFailed, match="taste: the service is down"):
        run(Loop(recipe(loop={"steps": 50, "max_empty_steps": 3}), node=node))


def test_groups_that_are_all_flat_end_the_run() -> None:
    def node(name: str) -> FakeNode:
        fake = FakeNode(name)
        fake.value = lambda task, member: Score(1.0)
        return fake

    with pytest.raises(RunFailed, match="earned the same reward"):
        run(Loop(recipe(loop={"steps": 50, "max_empty_steps": 3}), node=node))


def test_empty_groups_are_counted_and_their_prompts_given_up() -> None:
    def node(name: str) -> FakeNode:
        fake = FakeNode(name)
        fake.members = 0
        return fake

    loop = Loop(recipe(loop={"steps": 50, "prompt_retries": 0}, prompts={"epochs": 1}), prompts=6, node=node)
    with pytest.raises(RunFailed, match="before one step could be taken"):
        run(loop)
    assert loop.controller.counters["groups_empty"] == 6
    assert loop.controller.counters["prompts_given_up"] == 6


def test_prompts_that_end_with_every_reward_failing_end_the_run_with_the_reason() -> None:
    def node(name: str) -> FakeNode:
        fake = FakeNode(name)
        fake.value = lambda task, member: Score(None, "the service is down")
        return fake

    settings = recipe(loop={"steps": 50, "prompt_retries": 0, "max_empty_steps": 50}, prompts={"epochs": 1})
    with pytest.raises(RunFailed, match=r"before one step could be taken: taste: the service is down \(6 answers\)"):
        run(Loop(settings, prompts=3, node=node))


def test_the_last_epoch_ends_with_a_smaller_step() -> None:
    loop = run(Loop(recipe(loop={"steps": 50}, prompts={"epochs": 1}), prompts=5))
    assert [len(step.groups) for step in loop.witness.steps] == [2, 2, 1]
    assert sorted(loop.trained_positions) == [0, 1, 2, 3, 4]


def test_a_resumed_run_neither_repeats_nor_skips_a_prompt() -> None:
    settings = recipe(loop={"steps": 3, "max_staleness": 2}, checkpoint={"every": 3}, prompts={"epochs": 1})
    first = run(Loop(settings, prompts=20))
    longer = recipe(loop={"steps": 50, "max_staleness": 2}, prompts={"epochs": 1})
    second = Loop(longer, prompts=20)
    second.controller.restore(first.witness.checkpoints[-1])
    second.learners.version = second.controller.version
    run(second)
    assert second.witness.steps[0].step == 4
    assert sorted(first.trained_positions + second.trained_positions) == list(range(20))


def test_a_bug_in_a_node_ends_the_run_with_that_error() -> None:
    def node(name: str) -> FakeNode:
        fake = FakeNode(name)
        fake.value = lambda task, member: 1 / 0  # type: ignore[assignment, return-value]
        return fake

    with pytest.raises(ZeroDivisionError):
        run(Loop(recipe(), node=node))
