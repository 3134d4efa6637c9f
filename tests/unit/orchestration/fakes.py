"""Nodes and learners in this process, with delays and deaths on demand, for the controller's tests."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from ullim.config.load import check_recipe
from ullim.config.run import Recipe
from ullim.orchestration.changes import Changes
from ullim.orchestration.controller import Controller, StepOutcome
from ullim.orchestration.peers import NodeCounters, PeerDied, RolloutTask
from ullim.orchestration.publisher import Publication, WeightPublisher
from ullim.orchestration.stream import PromptStream
from ullim.orchestration.supervisor import NodePool
from ullim.records import Completion, LearnerBatch, Message, RolloutGroup, Score, StepReport
from ullim.weights.manifest import WeightManifest
from ullim.weights.session import SessionAddress, TransferFailed, TransferStats


def recipe(**sections: object) -> Recipe:
    """A small recipe; `loop={"steps": 3}` and the like override it."""
    data: dict[str, dict[str, object]] = {
        "policy": {"path": "model"},
        "prompts": {"path": "prompts.jsonl"},
        "rewards": {"taste": {"kind": "function", "function": "taste:like"}},
        "loop": {"steps": 4, "groups_per_step": 2, "group_size": 2, "max_staleness": 1, "watchdog_s": 2.0},
    }
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values}  # type: ignore[dict-item]
    return check_recipe(data, source="test")


class FakeNode:
    """Answers once `finished(task, version at its start)` holds; stamps what it makes with its version."""

    def __init__(self, name: str, *, finished: Callable[[RolloutTask, int], bool] = lambda task, started: True) -> None:
        self.name = name
        self.version = -1
        self.alive = True
        self.asleep = False
        self.finished = finished
        self.value: Callable[[RolloutTask, int], Score] = lambda task, member: Score(float(member))
        self.members: int | None = None
        self.fail_receives = 0
        self.rolled: list[tuple[int, int]] = []  # (prompt position, version at its start)

    async def rollout(self, task: RolloutTask) -> RolloutGroup:
        self.check()
        assert not self.asleep, "a sleeping node was asked to generate"
        started = self.version
        assert started >= 0, "a node without current weights was given a prompt"
        self.rolled.append((task.prompt.position, started))
        await asyncio.sleep(0)
        while not self.finished(task, started):
            self.check()
            await asyncio.sleep(0.001)
        self.check()
        members = task.group_size if self.members is None else self.members
        completions = tuple(
            Completion(
                token_ids=np.array([1, 2], dtype=np.int32),
                logprobs=np.array([-1.0, -1.0], dtype=np.float32),
                versions=np.array([started, self.version], dtype=np.int32),
                finish="stop",
                text="",
                scores={"taste": self.value(task, member)},
            )
            for member in range(members)
        )
        return RolloutGroup(task.ticket, task.prompt, completions, self.name)

    async def join(self, address: SessionAddress, manifest: WeightManifest) -> None:
        self.check()

    async def receive(self, version: int) -> None:
        await asyncio.sleep(0)
        self.check()
        if self.fail_receives:
            self.fail_receives -= 1
            raise TransferFailed(f"{self.name} lost the stream", [self.name])
        self.version = version

    async def clear(self) -> None: ...

    async def sleep(self) -> None:
        self.asleep = True

    async def wake(self) -> None:
        self.asleep = False

    async def counters(self) -> NodeCounters:
        self.check()
        return NodeCounters(self.version, 0, 0, 0, 0.0, 0.0)

    async def close(self) -> None: ...

    def kill(self) -> None:
        self.alive = False

    def check(self) -> None:
        if not self.alive:
            raise PeerDied(self.name, "killed by the test")


class FakeLearners:
    """Counts versions and remembers what it was given; `step_s` is how long a step takes."""

    manifest = WeightManifest((), (), 1024)

    def __init__(self, *, step_s: float = 0.0) -> None:
        self.version = 0
        self.step_s = step_s
        self.batches: list[LearnerBatch] = []
        self.permitted = -1
        self.publishing = False

    async def step(self, batch: LearnerBatch, publication: int) -> StepReport:
        assert batch.version == self.version
        await asyncio.sleep(self.step_s)
        while self.permitted < publication:
            await asyncio.sleep(0)
        assert not self.publishing, "parameters moved while they were being sent"
        self.batches.append(batch)
        self.version += 1
        return StepReport(self.version, {}, self.step_s)

    async def allow_update(self, publication: int) -> None:
        self.permitted = publication

    async def open_session(self, receivers: Sequence[str]) -> Mapping[str, SessionAddress]:
        return dict.fromkeys(receivers)  # type: ignore[return-value]  # the fakes need no address

    async def publish(self, version: int) -> TransferStats:
        assert version == self.version, "another version was published than the parameters are of"
        self.publishing = True
        await asyncio.sleep(0)
        self.publishing = False
        return TransferStats(**{field.name: 0 for field in fields(TransferStats)} | {"version": version})  # type: ignore[arg-type]

    async def save(self, directory: Path) -> None: ...

    async def load(self, directory: Path) -> None: ...

    async def close(self) -> None: ...


class Witness:
    """An Observer that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[StepOutcome] = []
        self.published: list[int] = []
        self.checkpoints: list[Mapping[str, object]] = []

    async def on_step(self, outcome: StepOutcome) -> None:
        self.steps.append(outcome)

    async def on_publication(self, publication: Publication, seconds: float) -> None:
        self.published.append(publication.version)

    async def on_checkpoint(self, version: int, state: Mapping[str, object]) -> None:
        self.checkpoints.append(state)


class Loop:
    """A controller with everything around it faked; `nodes` holds every node ever launched, by name."""

    def __init__(self, settings: Recipe, *, prompts: int = 100, node: Callable[[str], FakeNode] = FakeNode) -> None:
        self.settings = settings
        self.nodes: dict[str, list[FakeNode]] = {}
        self.notes: list[str] = []
        self.learners = FakeLearners()
        self.witness = Witness()
        self.changes = Changes()
        self.make_node = node
        self.stream = PromptStream(
            [(f"p{i}", (Message("user", str(i)),), np.array([i], dtype=np.int32)) for i in range(prompts)],
            seed=0,
            shuffle=False,
            epochs=settings.prompts.epochs,
            retries=settings.loop.prompt_retries,
        )
        self.pool = NodePool(
            [f"node-{i}" for i in range(settings.nodes.count)],
            self.launch,
            restarts=settings.nodes.restarts,
            changes=self.changes,
            note=self.notes.append,
        )
        self.controller = Controller(
            settings,
            stream=self.stream,
            pool=self.pool,
            learners=self.learners,
            publisher=WeightPublisher(self.learners, self.pool, attempts=3, deadline_s=1.0),
            observer=self.witness,
            changes=self.changes,
        )

    async def launch(self, name: str) -> FakeNode:
        node = self.make_node(name)
        self.nodes.setdefault(name, []).append(node)
        return node

    async def run(self) -> "Loop":
        await self.pool.start()
        async with asyncio.timeout(30):
            await self.controller.run()
        return self

    @property
    def trained_positions(self) -> list[int]:
        return [group.prompt.position for step in self.witness.steps for group in step.groups]

    @property
    def lags(self) -> list[int]:
        return [step.step - 1 - (g.oldest_version or 0) for step in self.witness.steps for g in step.groups]
