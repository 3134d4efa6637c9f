"""What the controller itself costs: gate, buffer, assembly and all its loops, with engines that answer at once.

    python benchmarks/controller.py [--completions 1000000]

Prints completions/s in windows over the run and the process's memory at the start and end of the second half, so
that growth would show. No Ray and no torch work beyond advantages: the nodes and learners are objects in this process.
"""

import argparse
import asyncio
import logging
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import psutil
import torch

from ullim.config.load import check_recipe
from ullim.orchestration.changes import Changes
from ullim.orchestration.controller import Controller, StepOutcome
from ullim.orchestration.peers import NodeCounters, RolloutTask
from ullim.orchestration.publisher import Publication, WeightPublisher
from ullim.orchestration.stream import PromptStream
from ullim.orchestration.supervisor import NodePool
from ullim.records import Completion, LearnerBatch, Message, RolloutGroup, Score, StepReport
from ullim.weights.manifest import WeightManifest
from ullim.weights.session import SessionAddress, TransferStats

GROUP_SIZE, GROUPS_PER_STEP, TOKENS = 8, 64, 64
SENT = TransferStats(**{field.name: 0 for field in fields(TransferStats)})


class InstantNode:
    """Answers in the same turn of the event loop, with ready-made tokens and two scores an answer."""

    def __init__(self) -> None:
        self.version = 0
        self._ids = np.arange(TOKENS, dtype=np.int32)
        self._logprobs = np.full(TOKENS, -1.0, dtype=np.float32)
        self._random = np.random.default_rng(0)

    async def rollout(self, task: RolloutTask) -> RolloutGroup:
        versions = np.full(TOKENS, self.version, dtype=np.int32)
        completions = tuple(
            Completion(
                self._ids,
                self._logprobs,
                versions,
                "stop",
                "",
                {"a": Score(float(a)), "b": Score(float(b))},
            )
            for a, b in self._random.normal(size=(task.group_size, 2))
        )
        return RolloutGroup(task.ticket, task.prompt, completions, "node-0")

    async def join(self, address: SessionAddress, manifest: WeightManifest) -> None: ...
    async def receive(self, version: int) -> None:
        self.version = version

    async def clear(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def counters(self) -> NodeCounters:
        return NodeCounters(self.version, 0, 0, 0, 0.0, 0.0)

    async def close(self) -> None: ...
    def kill(self) -> None: ...


class InstantLearners:
    """Counts versions."""

    manifest = WeightManifest((), (), 1024)

    async def step(self, batch: LearnerBatch, publication: int) -> StepReport:
        return StepReport(batch.version + 1, {}, 0.0)

    async def allow_update(self, publication: int) -> None: ...
    async def open_session(self, receivers: Sequence[str]) -> Mapping[str, SessionAddress]:
        nowhere = SessionAddress(**dict.fromkeys((field.name for field in fields(SessionAddress)), ""))
        return dict.fromkeys(receivers, nowhere)

    async def publish(self, version: int) -> TransferStats:
        return SENT

    async def save(self, directory: Path) -> None: ...
    async def load(self, directory: Path) -> None: ...
    async def close(self) -> None: ...


class Meter:
    """Prints the pace ten times over the run, and keeps the memory seen each time."""

    def __init__(self, steps: int) -> None:
        self._every = max(1, steps // 10)
        self._since = time.perf_counter()
        self.memory: list[int] = []

    async def on_step(self, outcome: StepOutcome) -> None:
        if outcome.step % self._every == 0:
            now = time.perf_counter()
            rate = self._every * GROUPS_PER_STEP * GROUP_SIZE / (now - self._since)
            self._since = now
            self.memory.append(psutil.Process().memory_info().rss)
            done = outcome.step * GROUPS_PER_STEP * GROUP_SIZE
            print(f"{done:>10,} completions   {rate:>8,.0f} completions/s   {self.memory[-1] / 2**20:>7.1f} MiB")

    async def on_publication(self, publication: Publication, seconds: float) -> None: ...
    async def on_checkpoint(self, version: int, state: Mapping[str, object]) -> None: ...


async def measure(completions: int) -> None:
    steps = max(10, completions // (GROUPS_PER_STEP * GROUP_SIZE))
    loop = {"steps": steps, "groups_per_step": GROUPS_PER_STEP, "group_size": GROUP_SIZE, "max_staleness": 2}
    channel = {"kind": "function", "function": "none:none"}
    recipe = check_recipe(
        {
            "policy": {"path": "none"},
            "prompts": {"path": "none.jsonl"},
            "rewards": {"a": channel, "b": channel},
            "loop": loop,
            "checkpoint": {"every": steps},
            "nodes": {"count": 4},
        },
        source="benchmark",
    )
    changes = Changes()
    prompts = [(f"p{i}", (Message("user", "hi"),), np.arange(16, dtype=np.int32)) for i in range(1000)]
    stream = PromptStream(prompts, seed=0, shuffle=True, epochs=None, retries=1)

    async def launch(name: str) -> InstantNode:
        return InstantNode()

    pool = NodePool([f"node-{i}" for i in range(4)], launch, restarts=0, changes=changes, note=print)
    learners, meter = InstantLearners(), Meter(steps)
    publisher = WeightPublisher(learners, pool, attempts=1, deadline_s=60.0)
    controller = Controller(
        recipe, stream=stream, pool=pool, learners=learners, publisher=publisher, observer=meter, changes=changes
    )
    await pool.start()
    started = time.perf_counter()
    await controller.run()
    seconds = time.perf_counter() - started
    total = steps * GROUPS_PER_STEP * GROUP_SIZE
    growth = (meter.memory[-1] - meter.memory[len(meter.memory) // 2]) / 2**20
    print(
        f"\n{total:,} completions in {seconds:.1f} s: {total / seconds:,.0f} completions/s "
        f"({'at least' if total / seconds >= 5000 else 'BELOW'} the 5,000 wanted)"
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"memory over the second half: {growth:+.1f} MiB; peak {peak:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=1_000_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    asyncio.run(measure(arguments.completions))


if __name__ == "__main__":
    main()
