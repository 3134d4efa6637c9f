"""What any generation engine must do, as checks that take a `Subject`.

A test file for one engine makes a `Subject` and runs every check of `ENGINE_CHECKS` on it. The reference is always a
plain full forward pass of the weights in question, computed apart from the engine.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import pytest

from ullim.engines.base import CompletionDelta, Engine, GenerationRequest, Sampling
from ullim.errors import BadInput
from ullim.records import FinishReason, FloatArray, IntArray
from ullim.weights.manifest import WeightManifest
from ullim.weights.transport import Receiver

WeightSet = Literal["old", "new"]


class Subject(Protocol):
    """One engine and all that is known of its model from elsewhere."""

    vocabulary: int
    max_context: int
    tolerance: float  # of a log-prob against the reference

    def start(self) -> Engine:
        """A fresh engine with the old weights, version 0, which never stops by itself and runs at least
        8 answers at once."""
        ...

    def weights(self, which: WeightSet, fail_after: int | None = None) -> tuple[WeightManifest, Receiver]:
        """A transfer of a set of weights; with `fail_after` the stream raises ConnectionError after so many tensors."""
        ...

    def reference(self, which: WeightSet, prompt: IntArray, completion: IntArray, temperature: float) -> FloatArray:
        """Log-probs [L] by a full forward pass."""
        ...

    def next_distribution(self, which: WeightSet, prompt: IntArray) -> FloatArray:
        """Probabilities [V] of the token after the prompt, temperature 1."""
        ...

    def text(self, token_ids: IntArray) -> str:
        """The engine's decoding of an answer."""
        ...


@dataclass
class Answer:
    """One member's deltas put together."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: FinishReason | None = None

    def take(self, delta: CompletionDelta) -> None:
        assert self.finish is None, "a delta after the last one"
        assert len(delta.token_ids) == len(delta.logprobs) == len(delta.versions)
        assert len(delta.token_ids) or delta.finish, "an empty delta that ends nothing"
        self.token_ids += delta.token_ids.tolist()
        self.logprobs += delta.logprobs.tolist()
        self.versions += delta.versions.tolist()
        self.finish = delta.finish

    @property
    def ids(self) -> IntArray:
        return np.array(self.token_ids, dtype=np.int32)


Answers = dict[tuple[str, int], Answer]


def request(
    name: str,
    prompt: Sequence[int] | IntArray,
    n: int = 1,
    *,
    tokens: int = 12,
    seed: int | None = 1,
    **sampling: object,
) -> GenerationRequest:
    """A request with short defaults."""
    options = {"max_new_tokens": tokens, "seed": seed, **sampling}
    return GenerationRequest(name, np.array(prompt, dtype=np.int32), n, Sampling(**options))  # type: ignore[arg-type]


async def collect(engine: Engine, requests: Sequence[GenerationRequest], into: Answers | None = None) -> Answers:
    """Every member's answer; `into` lets the caller watch it grow."""
    answers: Answers = {} if into is None else into
    async for delta in engine.generate(requests):
        answers.setdefault((delta.request_id, delta.member), Answer()).take(delta)
    assert {(r.request_id, member) for r in requests for member in range(r.n)} == answers.keys()
    assert all(answer.finish is not None for answer in answers.values())
    return answers


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition, at most 20 s."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"waited in vain for: {what}")


LONG = 120  # tokens of answers that something happens to half-way
PROMPTS = ([5, 9, 12, 3, 44, 17], [7, 7, 2, 30], [21, 4, 8, 15, 16, 23, 42, 11, 9], [33])


async def answers_are_complete(subject: Subject, engine: Engine) -> None:
    requests = [request(f"r{i}", prompt, n=1 + i, tokens=5 + i) for i, prompt in enumerate(PROMPTS)]
    answers = await collect(engine, requests)
    for (name, _), answer in answers.items():
        assert answer.finish == "length"
        assert len(answer.token_ids) == 5 + int(name[1:])
        assert all(0 <= token < subject.vocabulary for token in answer.token_ids)
        assert all(logprob <= 0 for logprob in answer.logprobs)
        assert set(answer.versions) == {0}


async def logprobs_are_of_the_sampled_distribution(subject: Subject, engine: Engine) -> None:
    requests = [
        request(f"{temperature}/{i}", prompt, n=2, temperature=temperature)
        for temperature in (0.0, 0.6, 1.0, 1.7)
        for i, prompt in enumerate(PROMPTS)
    ]
    answers = await collect(engine, requests)
    for wanted in requests:
        for member in range(wanted.n):
            answer = answers[wanted.request_id, member]
            expected = subject.reference("old", wanted.prompt_ids, answer.ids, wanted.sampling.temperature)
            np.testing.assert_allclose(answer.logprobs, expected, atol=subject.tolerance)


async def greedy_takes_the_most_likely(subject: Subject, engine: Engine) -> None:
    answers = await collect(engine, [request(f"g{i}", p, temperature=0.0, tokens=6) for i, p in enumerate(PROMPTS)])
    for i, prompt in enumerate(PROMPTS):
        sequence = list(prompt)
        for token in answers[f"g{i}", 0].token_ids:
            distribution = subject.next_distribution("old", np.array(sequence, dtype=np.int32))
            # Within rounding of the best: two engines may break a tie differently.
            assert np.log(distribution[token]) >= np.log(distribution.max()) - subject.tolerance
            sequence.append(token)


async def first_tokens_follow_the_distribution(subject: Subject, engine: Engine) -> None:
    draws = 2000
    prompt = np.array(PROMPTS[0], dtype=np.int32)
    answers = await collect(engine, [request("many", prompt, n=draws, tokens=1, seed=None)])
    counts = np.bincount([a.token_ids[0] for a in answers.values()], minlength=subject.vocabulary)
    expected = draws * subject.next_distribution("old", prompt).astype(np.float64)
    usual = expected >= 5
    statistic = float((((counts - expected) ** 2) / expected)[usual].sum())
    degrees = int(usual.sum())
    # Mean plus five standard deviations of chi-square: seen by chance less than once in a hundred thousand runs.
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5 + 5


async def seeds_fix_an_answer_whatever_else_runs(subject: Subject, engine: Engine) -> None:
    alone = await collect(engine, [request("a", PROMPTS[0], n=2, seed=77)])
    crowd = [request(f"c{i}", PROMPTS[i % 4], n=3, seed=i) for i in range(6)]
    again = await collect(engine, [*crowd[:3], request("a", PROMPTS[0], n=2, seed=77), *crowd[3:]])
    other = await collect(engine, [request("a", PROMPTS[0], n=2, seed=78)])
    for member in range(2):
        assert again["a", member].token_ids == alone["a", member].token_ids
    assert alone["a", 0].token_ids != alone["a", 1].token_ids
    assert other["a", 0].token_ids != alone["a", 0].token_ids


async def unseeded_requests_differ(subject: Subject, engine: Engine) -> None:
    answers = await collect(engine, [request(f"u{i}", PROMPTS[0], seed=None) for i in range(6)])
    assert len({tuple(a.token_ids) for a in answers.values()}) == 6


async def a_stop_token_ends_and_is_kept(subject: Subject, engine: Engine) -> None:
    free = await collect(engine, [request("free", PROMPTS[2], n=8, tokens=16)])
    stop = Counter(t for a in free.values() for t in a.token_ids[2:10]).most_common(1)[0][0]
    stopped = await collect(engine, [request("free", PROMPTS[2], n=8, tokens=16, stop_token_ids=(stop,))])
    assert any(a.finish == "stop" for a in stopped.values())
    for key, answer in stopped.items():
        whole = free[key].token_ids
        if stop in whole:
            assert answer.token_ids == whole[: whole.index(stop) + 1]
            assert answer.finish == "stop"
        else:
            assert answer.token_ids == whole
            assert answer.finish == "length"


async def a_stop_string_ends_where_it_first_appears(subject: Subject, engine: Engine) -> None:
    free = await collect(engine, [request("free", PROMPTS[2], n=8, tokens=16)])
    string = subject.text(free["free", 0].ids[4:6])
    stopped = await collect(engine, [request("free", PROMPTS[2], n=8, tokens=16, stop_strings=(string, "\x00never"))])
    assert stopped["free", 0].finish == "stop"
    for key, answer in stopped.items():
        whole = free[key]
        ends = [k for k in range(1, 17) if string in subject.text(whole.ids[:k])]
        assert answer.token_ids == whole.token_ids[: ends[0] if ends else 16]
        assert answer.finish == ("stop" if ends else "length")


async def the_context_bounds_an_answer(subject: Subject, engine: Engine) -> None:
    prompt = np.resize(np.array(PROMPTS[0]), subject.max_context - 3)
    answers = await collect(engine, [request("long", prompt, tokens=50), request("short", PROMPTS[1], tokens=5)])
    assert (len(answers["long", 0].token_ids), answers["long", 0].finish) == (3, "length")
    assert len(answers["short", 0].token_ids) == 5
    with pytest.raises(BadInput, match="context"):
        await collect(engine, [request("full", np.resize(np.array(PROMPTS[0]), subject.max_context))])


async def pause_keep_freezes_and_resume_goes_on(subject: Subject, engine: Engine) -> None:
    requests = [request("a", PROMPTS[0], n=3, tokens=LONG), request("b", PROMPTS[1], n=2, tokens=LONG)]
    undisturbed = await collect(engine, requests)
    answers: Answers = {}
    task = asyncio.create_task(collect(engine, requests, answers))
    await until(lambda: len(answers) == 5, "first tokens")
    await engine.pause("keep")
    await asyncio.sleep(0.05)  # what was sampled before the pause may still be on its way
    before = {key: len(a.token_ids) for key, a in answers.items()}
    generated = engine.load().generated_tokens
    await asyncio.sleep(0.2)
    assert engine.load().generated_tokens == generated
    assert {key: len(a.token_ids) for key, a in answers.items()} == before
    await engine.resume()
    await task
    for key, answer in answers.items():
        assert answer.token_ids == undisturbed[key].token_ids


async def pause_abort_ends_all_with_what_they_have(subject: Subject, engine: Engine) -> None:
    answers: Answers = {}
    task = asyncio.create_task(collect(engine, [request("a", PROMPTS[0], n=20, tokens=LONG)], answers))
    await until(lambda: bool(answers), "first tokens")
    await engine.pause("abort")
    await asyncio.wait_for(task, 20)
    assert any(a.finish == "aborted" and a.token_ids for a in answers.values())
    assert {a.finish for a in answers.values()} <= {"aborted", "length"}
    assert engine.load().running == engine.load().waiting == 0
    await engine.resume()
    assert len((await collect(engine, [request("b", PROMPTS[0])]))["b", 0].token_ids) == 12


async def abort_ends_only_the_named(subject: Subject, engine: Engine) -> None:
    stay = request("stay", PROMPTS[0], n=2, tokens=LONG)
    undisturbed = await collect(engine, [stay])
    answers: Answers = {}
    task = asyncio.create_task(collect(engine, [stay, request("go", PROMPTS[1], n=2, tokens=LONG)], answers))
    await until(lambda: len(answers) == 4, "first tokens")
    await engine.pause()
    await engine.abort(["go", "unheard-of"])
    await engine.resume()
    await task
    for member in range(2):
        assert answers["go", member].finish == "aborted"
        assert answers["stay", member].token_ids == undisturbed["stay", member].token_ids


async def closing_the_iterator_aborts_what_is_left(subject: Subject, engine: Engine) -> None:
    stream = engine.generate([request("a", PROMPTS[0], n=60, tokens=LONG)])
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: engine.load().running + engine.load().waiting == 0, "an idle engine")
    assert engine.load().generated_tokens < 60 * LONG


async def weights_need_a_pause(subject: Subject, engine: Engine) -> None:
    manifest, receiver = subject.weights("new")
    with pytest.raises(RuntimeError, match="pause"):
        await engine.receive_weights(manifest, receiver, 1)
    assert engine.version == 0


async def idle_updates_replace_the_policy(subject: Subject, engine: Engine) -> None:
    wanted = request("a", PROMPTS[0], n=2)
    await collect(engine, [wanted])
    await engine.pause()
    await engine.receive_weights(*subject.weights("new"), 3)
    await engine.resume()
    assert engine.version == 3
    for answer in (await collect(engine, [wanted])).values():
        assert set(answer.versions) == {3}
        expected = subject.reference("new", wanted.prompt_ids, answer.ids, 1.0)
        np.testing.assert_allclose(answer.logprobs, expected, atol=subject.tolerance)


async def answers_live_through_an_update(subject: Subject, engine: Engine) -> None:
    requests = [request(f"r{i}", prompt, n=1 + i % 3, tokens=LONG) for i, prompt in enumerate(PROMPTS)]
    answers: Answers = {}
    task = asyncio.create_task(collect(engine, requests, answers))
    await until(lambda: len(answers) == 7, "first tokens")
    await engine.pause("keep")
    await engine.receive_weights(*subject.weights("new"), 1)
    await engine.resume()
    await task
    for wanted in requests:
        for member in range(wanted.n):
            answer = answers[wanted.request_id, member]
            switch = answer.versions.index(1)
            assert switch > 0
            assert answer.versions == [0] * switch + [1] * (LONG - switch)
            old = subject.reference("old", wanted.prompt_ids, answer.ids, 1.0)
            new = subject.reference("new", wanted.prompt_ids, answer.ids, 1.0)
            # After the update: a full forward of the new weights over all that came before, nothing cached left.
            np.testing.assert_allclose(answer.logprobs[:switch], old[:switch], atol=subject.tolerance)
            np.testing.assert_allclose(answer.logprobs[switch:], new[switch:], atol=subject.tolerance)
            assert np.abs(old - new).max() > 10 * subject.tolerance


async def a_failed_transfer_changes_nothing(subject: Subject, engine: Engine) -> None:
    wanted = request("a", PROMPTS[0], n=2, tokens=LONG)
    undisturbed = await collect(engine, [wanted])
    tensors = len(subject.weights("new")[0].entries)
    for fail_after in (0, tensors - 1, tensors):
        answers: Answers = {}
        task = asyncio.create_task(collect(engine, [wanted], answers))
        await until(lambda answers=answers: len(answers) == 2, "first tokens")  # type: ignore[misc]
        await engine.pause()
        with pytest.raises(ConnectionError):
            await engine.receive_weights(*subject.weights("new", fail_after), 1)
        assert engine.version == 0
        await engine.resume()
        await task
        for key, answer in answers.items():
            assert answer.token_ids == undisturbed[key].token_ids
            assert set(answer.versions) == {0}
    await engine.pause()
    await engine.receive_weights(*subject.weights("new"), 1)
    await engine.resume()
    assert engine.version == 1


async def sleep_keeps_running_answers(subject: Subject, engine: Engine) -> None:
    wanted = request("a", PROMPTS[0], n=3, tokens=LONG)
    undisturbed = await collect(engine, [wanted])
    with pytest.raises(RuntimeError, match="pause"):
        await engine.sleep()
    answers: Answers = {}
    task = asyncio.create_task(collect(engine, [wanted], answers))
    await until(lambda: len(answers) == 3, "first tokens")
    await engine.pause()
    await engine.sleep()
    with pytest.raises(RuntimeError, match="wake"):
        await engine.resume()
    await engine.wake()
    await engine.resume()
    await task
    for key, answer in answers.items():
        assert answer.token_ids == undisturbed[key].token_ids


async def weights_may_arrive_asleep(subject: Subject, engine: Engine) -> None:
    await engine.pause()
    await engine.sleep()
    await engine.receive_weights(*subject.weights("new"), 1)
    await engine.wake()
    await engine.resume()
    answer = (await collect(engine, [request("a", PROMPTS[0])]))["a", 0]
    expected = subject.reference("new", np.array(PROMPTS[0], dtype=np.int32), answer.ids, 1.0)
    np.testing.assert_allclose(answer.logprobs, expected, atol=subject.tolerance)


async def probe_scores_under_the_present_weights(subject: Subject, engine: Engine) -> None:
    pairs = [
        (np.array(PROMPTS[i], dtype=np.int32), np.array(PROMPTS[j], dtype=np.int32))
        for i, j in ((0, 1), (1, 2), (3, 0), (2, 3))
    ]
    pairs.append((np.array(PROMPTS[0], dtype=np.int32), np.array([], dtype=np.int32)))
    await engine.pause()
    for which in ("old", "new"):
        if which == "new":
            await engine.receive_weights(*subject.weights("new"), 1)
        for temperature in (1.0, 0.5):
            for pair, found in zip(pairs, await engine.probe(pairs, temperature), strict=True):
                assert found.shape == pair[1].shape
                expected = subject.reference(which, *pair, temperature)
                np.testing.assert_allclose(found, expected, atol=subject.tolerance)


async def load_counts(subject: Subject, engine: Engine) -> None:
    await engine.pause()
    task = asyncio.create_task(collect(engine, [request("a", PROMPTS[0], n=3, tokens=7)]))
    await until(lambda: engine.load().running + engine.load().waiting == 3, "three sequences")
    assert engine.load().generated_tokens == 0
    await engine.resume()
    await task
    load = engine.load()
    assert (load.running, load.waiting, load.generated_tokens) == (0, 0, 21)
    assert load.busy_s > 0


async def closing_ends_everything(subject: Subject, engine: Engine) -> None:
    await engine.pause()
    task = asyncio.create_task(collect(engine, [request("a", PROMPTS[0])]))
    await until(lambda: engine.load().running + engine.load().waiting == 1, "one sequence")
    await engine.close()
    with pytest.raises(RuntimeError):
        await asyncio.wait_for(task, 20)
    with pytest.raises(RuntimeError):
        await collect(engine, [request("b", PROMPTS[0])])
    with pytest.raises(RuntimeError):
        await engine.pause()
    await engine.close()


Check = Callable[[Subject, Engine], Awaitable[None]]

ENGINE_CHECKS: tuple[Check, ...] = (
    answers_are_complete,
    logprobs_are_of_the_sampled_distribution,
    greedy_takes_the_most_likely,
    first_tokens_follow_the_distribution,
    seeds_fix_an_answer_whatever_else_runs,
    unseeded_requests_differ,
    a_stop_token_ends_and_is_kept,
    a_stop_string_ends_where_it_first_appears,
    the_context_bounds_an_answer,
    pause_keep_freezes_and_resume_goes_on,
    pause_abort_ends_all_with_what_they_have,
    abort_ends_only_the_named,
    closing_the_iterator_aborts_what_is_left,
    weights_need_a_pause,
    idle_updates_replace_the_policy,
    answers_live_through_an_update,
    a_failed_transfer_changes_nothing,
    sleep_keeps_running_answers,
    weights_may_arrive_asleep,
    probe_scores_under_the_present_weights,
    load_counts,
    closing_ends_everything,
)


def run_check(check: Check, subject: Subject, deadline_s: float = 60.0) -> None:
    """Run one check on a fresh engine, within the deadline."""

    async def body() -> None:
        engine = subject.start()
        try:
            await asyncio.wait_for(check(subject, engine), deadline_s)
        finally:
            await engine.close()

    asyncio.run(body())
