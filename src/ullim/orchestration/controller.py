"""The controller: four loops around one buffer.

::

    prompts ──▶ admit ──ticket──▶ roll (one task per group, on some node) ──▶ buffer
                  ▲                                                             │ B oldest groups
       slots freed│                                                             ▼
                publish ◀──────────────── version v+1 ◀────────────────────── train
                  └─ nodes hold v+1                          (join: restarted nodes get weights)

Everything runs in one asyncio loop, so state needs no locks; the heavy work is in other processes. The
controller knows neither Ray nor torch.distributed: see `peers.py`.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ullim.config.run import Recipe
from ullim.errors import RunFailed
from ullim.orchestration.assembly import Assembly, assemble
from ullim.orchestration.buffer import RolloutBuffer
from ullim.orchestration.changes import Changes
from ullim.orchestration.gate import StalenessGate
from ullim.orchestration.peers import Learners, Node, PeerDied, RolloutTask
from ullim.orchestration.publisher import Publication, WeightPublisher
from ullim.orchestration.stream import PromptStream
from ullim.orchestration.supervisor import NodePool, Seat, SeatState
from ullim.orchestration.watchdog import Watchdog
from ullim.records import Prompt, RolloutGroup, StepReport


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Everything that one step left behind, for metrics, samples and the live view."""

    step: int  # the version it made
    groups: tuple[RolloutGroup, ...]
    assembly: Assembly
    report: StepReport
    wait_s: float  # the learner idle, waiting for groups
    train_s: float
    counters: Mapping[str, int]  # totals since the run began
    in_flight: int
    buffered: int
    slots_held: int
    slots: int


class Observer(Protocol):
    """Who is told of every step. Called in order, awaited: what it writes is on disk before the next step ends."""

    async def on_step(self, outcome: StepOutcome) -> None: ...

    async def on_publication(self, publication: Publication, seconds: float) -> None: ...

    async def on_checkpoint(self, version: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint of `version`; returns once it is complete on disk."""
        ...


class Controller:
    """Drives a run from the learners' `version` to `recipe.loop.steps`, or to the end of the prompts."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        stream: PromptStream,
        pool: NodePool,
        learners: Learners,
        publisher: WeightPublisher,
        observer: Observer,
        changes: Changes,
        version: int = 0,
    ) -> None:
        self._recipe = recipe
        self._stream = stream
        self._pool = pool
        self._learners = learners
        self._publisher = publisher
        self._observer = observer
        self._changes = changes
        self.version = version  # of the learners
        self.gate = StalenessGate(groups_per_step=recipe.loop.groups_per_step, max_staleness=recipe.max_staleness)
        self.buffer = RolloutBuffer(self.gate.fresh)
        self.counters: Counter[str] = Counter()
        self._rolling: dict[int, asyncio.Task[None]] = {}
        self._publishing: asyncio.Task[None] | None = None
        self._learner_turn = asyncio.Lock()  # held while parameters may change
        self._learner_state = "idle"
        self._empty_steps = 0
        self._unscored: Counter[str] = Counter()  # by reason, since the run began
        self._watchdog = Watchdog(recipe.loop.watchdog_s, self.describe)

    async def run(self) -> None:
        """Raises the first failure of any loop; the others are ended before."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                loops = [
                    self._tasks.create_task(self._watchdog.watch(), name="watchdog"),
                    self._tasks.create_task(self._admit(), name="admit"),
                    self._tasks.create_task(self._join(), name="join"),
                ]
                await self._train()
                for task in [*loops, *self._rolling.values()]:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from None

    # The loops ------------------------------------------------------------------------------------------

    async def _admit(self) -> None:
        """Consumes prompts; waits for a free slot and a serving node; unblocked by publications and drops."""
        while True:
            await self._changes.until(
                lambda: self.gate.can_admit() and not self._stream.exhausted and self._pool.pick() is not None
            )
            prompt = self._stream.next()
            assert prompt is not None
            ticket = self.gate.admit()
            self._rolling[ticket] = self._tasks.create_task(self._roll(ticket, prompt), name=f"group {ticket}")

    async def _roll(self, ticket: int, prompt: Prompt) -> None:
        """Produces one group, on whichever node lives; at most `group_attempts` nodes are tried."""
        task = RolloutTask(ticket, prompt, self._recipe.loop.group_size, self._sampling_seed(prompt))
        try:
            for _ in range(self._recipe.nodes.group_attempts):
                await self._changes.until(lambda: self._pool.pick() is not None)
                seat = self._pool.pick()
                assert seat is not None
                try:
                    group = await self._pool.rollout(seat, task)
                except PeerDied:
                    self.counters["groups_moved"] += 1
                    continue
                self._watchdog.touch()
                if group.oldest_version is None:
                    self._drop(ticket, prompt, "groups_empty")
                else:
                    self.buffer.put(group)
                    self._return_stale()
                return
            self._drop(ticket, prompt, "groups_without_node")
        finally:
            del self._rolling[ticket]
            self._changes.notify()

    async def _train(self) -> None:
        """Consumes the B oldest groups; its optimiser waits for the publication of the version it starts from."""
        while self.version < self._recipe.loop.steps:
            waiting_since = time.monotonic()
            await self._changes.until(self._batch_is_ready)
            groups = self.buffer.take(self._recipe.loop.groups_per_step, self.version)
            if not groups:  # the prompts have come to their end
                if self.version == 0:
                    raise RunFailed(f"the prompts came to their end before one step could be taken: {self._reasons()}")
                break
            assembly = self._assemble(groups)
            if not assembly.batch.sequences:
                self._return_unscored(groups)
                continue
            training_since = time.monotonic()
            report = await self._step(assembly)
            trained_at = time.monotonic()
            self._close_step(groups, report)
            self._publishing = self._tasks.create_task(self._publish(self.version), name=f"publish {self.version}")
            if self._recipe.loop.mode == "sync":
                await self._publishing
            await self._observer.on_step(
                StepOutcome(
                    step=self.version,
                    groups=tuple(groups),
                    assembly=assembly,
                    report=report,
                    wait_s=training_since - waiting_since,
                    train_s=trained_at - training_since,
                    counters=dict(self.counters),
                    in_flight=len(self._rolling),
                    buffered=len(self.buffer),
                    slots_held=self.gate.held,
                    slots=self.gate.capacity,
                )
            )
            if self.version % self._recipe.checkpoint.every == 0:
                await self._checkpoint()
        if self._publishing is not None:
            await self._publishing
        if self.version % self._recipe.checkpoint.every:
            await self._checkpoint()

    async def _join(self) -> None:
        """Gives nodes that have just started the current weights, unless a running step is about to."""
        while True:
            await self._changes.until(lambda: self._pool.failed or bool(self._pool.in_state(SeatState.JOINING)))
            self._pool.check()
            async with self._learner_turn:
                if self._pool.in_state(SeatState.JOINING):
                    await self._publish(self.version)

    # Their steps ----------------------------------------------------------------------------------------

    def _sampling_seed(self, prompt: Prompt) -> int:
        """One seed per run, position and try: a resumed run draws the same, a retry draws anew."""
        entropy = (self._recipe.run.seed, prompt.position, self._stream.tries(prompt))
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])

    def _batch_is_ready(self) -> bool:
        """A full batch; or, at the end of the prompts, whatever is left."""
        full = len(self.buffer) >= self._recipe.loop.groups_per_step
        return full or (self._stream.exhausted and not self._rolling)

    def _assemble(self, groups: list[RolloutGroup]) -> Assembly:
        recipe = self._recipe
        weights = {name: channel.weight for name, channel in recipe.rewards.items()}
        assembly = assemble(groups, version=self.version, weights=weights, settings=recipe.objective.advantage)
        self.counters["answers_unscored"] += sum(assembly.unscored.values())
        self._unscored += assembly.unscored
        self._empty_steps = self._empty_steps + 1 if assembly.teaches_nothing else 0
        if self._empty_steps >= recipe.loop.max_empty_steps:
            raise RunFailed(
                f"every advantage was 0 in {self._empty_steps} steps in a row (loop.max_empty_steps): {self._reasons()}"
            )
        return assembly

    def _reasons(self) -> str:
        """Why nothing could be learned, the most frequent reasons first."""
        if not self._unscored:
            return "all answers of each group earned the same reward, so there is nothing to compare"
        return "; ".join(f"{reason} ({count} answers)" for reason, count in self._unscored.most_common(5))

    async def _step(self, assembly: Assembly) -> StepReport:
        """Forward and backward overlap the running publication; the optimiser moves once it is over."""
        async with self._learner_turn, self._devices_to_learners():
            self._learner_state = f"trains step {self.version + 1}"
            step = asyncio.ensure_future(self._learners.step(assembly.batch, self.version))
            try:
                if self._publishing is not None:
                    await self._publishing
                await self._learners.allow_update(self.version)
                return await step
            finally:
                step.cancel()
                self._learner_state = "idle"

    @contextlib.asynccontextmanager
    async def _devices_to_learners(self) -> AsyncIterator[None]:
        """In sync mode the nodes sleep while the learners work: both may live on the same devices."""
        if self._recipe.loop.mode == "async":
            yield
            return
        await self._on_serving_nodes(lambda node: node.sleep())
        yield
        await self._on_serving_nodes(lambda node: node.wake())

    async def _on_serving_nodes(self, call: Callable[[Node], Awaitable[None]]) -> None:
        async def guarded(seat: Seat, node: Node) -> None:
            try:
                await call(node)
            except PeerDied as death:
                self._pool.died(seat, node, str(death))

        seats = self._pool.in_state(SeatState.SERVING)
        await asyncio.gather(*(guarded(seat, seat.node) for seat in seats if seat.node is not None))

    def _close_step(self, groups: list[RolloutGroup], report: StepReport) -> None:
        self.version = report.version
        self._watchdog.touch()
        for group in groups:
            self.gate.train(group.ticket, self.version)
            self._stream.done(group.prompt)
        self._return_stale()

    async def _publish(self, version: int) -> None:
        started = time.monotonic()
        publication = await self._publisher.publish(version)
        if publication.holders:
            self._watchdog.touch()
            self.gate.nodes_hold(version)
            await self._observer.on_publication(publication, time.monotonic() - started)
        self._changes.notify()

    def _return_unscored(self, groups: list[RolloutGroup]) -> None:
        """Not one answer has its scores: nothing to train on, so no step is taken."""
        for group in groups:
            self._drop(group.ticket, group.prompt, "groups_unscored")
        self._changes.notify()

    def _return_stale(self) -> None:
        for group in self.buffer.discard_stale(self.version):
            self.counters["answers_stale"] += len(group.completions)
            self._drop(group.ticket, group.prompt, "groups_stale")
        self._changes.notify()

    def _drop(self, ticket: int, prompt: Prompt, why: str) -> None:
        """The group will not be trained on; its prompt is asked again within its retries."""
        self.counters[why] += 1
        self.gate.drop(ticket)
        if not self._stream.give_back(prompt):
            self.counters["prompts_given_up"] += 1
            self._stream.done(prompt)

    async def _checkpoint(self) -> None:
        """While no parameter moves: weights, optimiser and the state of gate and stream, of one version."""
        async with self._learner_turn:
            self._learner_state = f"writes checkpoint {self.version}"
            state = {"version": self.version, "gate": self.gate.state(), "stream": self._stream.state()}
            await self._observer.on_checkpoint(self.version, {**state, "counters": dict(self.counters)})
            self._learner_state = "idle"
        self._watchdog.touch()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state; the learners have loaded theirs."""
        self.version = int(state["version"])
        self.gate.restore(state["gate"])
        self._stream.restore(state["stream"])
        self.counters.update(state["counters"])

    def describe(self) -> str:
        """Who waits for whom, for the watchdog."""
        gate, publishing = self.gate, self._publishing
        lines = [
            f"learners   version {self.version}, {self._learner_state}",
            f"gate       {gate.held} of {gate.capacity} slots held, {len(gate.open_tickets)} groups open",
            f"buffer     {len(self.buffer)} ready groups, {self._recipe.loop.groups_per_step} make a step",
            f"prompts    {'none left' if self._stream.exhausted else 'more to come'}",
            f"publisher  {'sending' if publishing and not publishing.done() else 'idle'}",
        ]
        for seat in self._pool.seats.values():
            tickets = ", ".join(map(str, sorted(seat.in_flight)[:8])) or "none"
            lines.append(f"{seat.name:<10} {seat.state.value}, version {seat.version}, in flight: {tickets}")
        return "\n".join(lines)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that came first; the rest are its consequences."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
