"""What each learner rank does in the tests, in a process of its own: `rank_worker.py FOLDER RANK WORLD PORT NAME...`.

Every scenario takes the folder that the test made (a model in it, and perhaps a checkpoint) and returns arrays by name.
The tests run the same scenarios in their own process as the one rank of one.
"""

import dataclasses
import sys
import threading
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ullim.config.learner import LearnerConfig
from ullim.config.objective import ObjectiveConfig
from ullim.config.policy import PolicyConfig
from ullim.errors import RunFailed
from ullim.learner.learner import Learner
from ullim.learner.publish import gather_to_first
from ullim.learner.ranks import RankPlace
from ullim.records import LearnerBatch, Sequence

VOCABULARY, CONTEXT, MAX_NEW = 61, 64, 12
Arrays = dict[str, np.ndarray[Any, Any]]


def make_batch(version: int = 0, groups: int = 5, members: int = 3, seed: int = 1) -> LearnerBatch:
    """Groups of unequal prompts and answers, with advantages of both signs."""
    draw = np.random.default_rng(seed + version)
    sequences = []
    for group in range(groups):
        prompt = draw.integers(0, VOCABULARY, draw.integers(2, 10)).astype(np.int32)
        for _ in range(members):
            length = int(draw.integers(1, MAX_NEW + 1))
            sequences.append(
                Sequence(
                    prompt,
                    draw.integers(0, VOCABULARY, length).astype(np.int32),
                    draw.normal(-4.1, 0.2, length).astype(np.float32),
                    float(draw.normal()),
                    group,
                    np.full(length, version, np.int32),
                )
            )
    return LearnerBatch(version, tuple(sequences))


def make_learner(folder: Path, place: RankPlace, *, model: str = "llama", **settings: Any) -> Learner:
    """A learner on a tiny model; settings are those of the three config sections, flat."""

    def of(section: Any, **defaults: Any) -> Any:
        return section(**(defaults | {n: settings[n] for n in settings if n in section.model_fields}))

    return Learner(
        of(PolicyConfig, path=str(folder / model), compute_dtype="float32"),
        of(LearnerConfig, learning_rate=1e-3, max_grad_norm=1e9),
        of(ObjectiveConfig),
        temperature=0.8,
        max_new_tokens=MAX_NEW,
        place=place,
        seed=3,
        bad_samples=folder / "bad.jsonl",
    )


def weights(learner: Learner) -> Arrays:
    manifest = learner.manifest(None, 2**20)
    return {f"weight/{name}": tensor.clone().numpy() for name, tensor in learner.full_parameters(manifest)}


def gradients(learner: Learner) -> Arrays:
    """Of the first update, whole on rank 0: AdamW's first moment is then 0.1 × gradient."""
    whole = {n: gather_to_first(t, torch.float32, learner._ranks) for n, t in learner._optimiser.moments().items()}
    return {n.replace("exp_avg", "gradient"): t.numpy() / 0.1 for n, t in whole.items() if n.startswith("exp_avg/")}


def one_step(folder: Path, place: RankPlace, batch: LearnerBatch | None = None, **settings: Any) -> Arrays:
    learner = make_learner(folder, place, **settings)
    report = learner.step(batch or make_batch())
    measured = {f"metric/{name}": np.float64(value) for name, value in report.metrics.items()}
    logprobs = {f"logprobs/{i}": values for i, values in enumerate(report.sequence_logprobs)}
    found = measured | logprobs | gradients(learner) | weights(learner)
    learner.close()
    return found


STEPS: dict[str, dict[str, Any]] = {
    "whole": {},
    "cut": {"micro_batch_tokens": 25},
    "tied": {"model": "qwen"},
    "tied-cut-recomputed": {"model": "qwen", "micro_batch_tokens": 25, "gradient_checkpointing": True},
    "sequence-mean": {"aggregation": "sequence-mean"},
    "two-updates": {"updates_per_step": 2, "micro_batch_tokens": 40},
    "everything": {
        "kl_coefficient": 0.1,
        "aggregation": "constant",
        "ratio": "sequence",
        "exploration": {"kind": "kl_cov", "fraction": 0.1, "entropy_bonus": 0.01},
        "updates_per_step": 2,
    },
}


def lone_sequence(folder: Path, place: RankPlace) -> Arrays:
    return one_step(folder, place, make_batch(groups=1, members=1))


def bad_steps(folder: Path, place: RankPlace) -> Arrays:
    """A good step, then NaN advantages until the learner gives up."""
    learner = make_learner(folder, place, max_bad_steps=2)
    learner.step(make_batch(0))
    before = weights(learner)

    def broken(version: int) -> LearnerBatch:
        batch = make_batch(version)
        spoilt = dataclasses.replace(batch.sequences[4], advantage=float("nan"))
        return LearnerBatch(version, (*batch.sequences[:4], spoilt, *batch.sequences[5:]))

    report = learner.step(broken(1))
    after = weights(learner)
    stopped = ""
    try:
        learner.step(broken(2))
    except RunFailed as error:
        stopped = str(error)
    learner.close()
    return {
        "skipped": np.array(str(report.skipped)),
        "version": np.array(report.version),
        "finite": np.array(all(np.isfinite(v) for v in report.metrics.values())),
        "moved": np.array(any((before[name] != after[name]).any() for name in before)),
        "stopped": np.array(stopped),
    }


class SlowSender:
    """Takes one tensor, waits until the next step computes, then gives the optimiser time to move too soon."""

    def __init__(self, computing: threading.Event, moved: threading.Event) -> None:
        self._computing, self._moved = computing, moved
        self.received: Arrays = {}
        self.overlapped = False

    def send(self, manifest: Any, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> Any:
        for name, tensor in tensors:
            self.received[f"weight/{name}"] = tensor.clone().numpy()
            if len(self.received) == 1:
                self.overlapped = self._computing.wait(60)
                self._moved.wait(1)
        return version

    def close(self) -> None:
        pass


def overlap(folder: Path, place: RankPlace) -> Arrays:
    """Publish version 1 while step 2 computes; then a sender that fails, and one more that does not."""
    learner = make_learner(folder, place)
    learner.step(make_batch(0))
    expected = weights(learner)
    computing, moved = threading.Event(), threading.Event()
    policy, optimiser = learner._policy, learner._optimiser
    own_logprobs, own_update = policy.logprobs, optimiser.update

    def logprobs(batch: Any) -> Any:
        result = own_logprobs(batch)
        computing.set()
        return result

    def update(*arguments: Any) -> None:
        own_update(*arguments)
        moved.set()

    policy.logprobs, optimiser.update = logprobs, update  # type: ignore[method-assign]
    sender = SlowSender(computing, moved) if place.rank == 0 else None
    manifest = learner.manifest(None, 2**20)
    publication = learner.publish(sender, manifest)
    learner.step(make_batch(1))
    publication.wait(60)
    later = weights(learner)

    class Failing(SlowSender):
        def send(self, manifest: Any, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> Any:
            next(iter(tensors))
            raise RunFailed("receiver lost")

    failed = learner.publish(Failing(computing, moved) if place.rank == 0 else None, manifest)
    failed.wait_until_ended(60)
    moved.clear()
    again = SlowSender(computing, computing) if place.rank == 0 else None
    learner.publish(again, manifest).wait(60)
    learner.close()
    if sender is None or again is None:
        return {"failed": np.array(str(failed.error))}
    same = [np.array_equal(sender.received[name], expected[name]) for name in expected]
    return {
        "overlapped": np.array(sender.overlapped),
        "of-version": np.array(all(same) and len(sender.received) == len(expected)),
        "then-moved": np.array(any((later[name] != expected[name]).any() for name in expected)),
        "failed": np.array(str(failed.error)),
        "again": np.array(all(np.array_equal(again.received[name], later[name]) for name in later)),
    }


def save_after_one(folder: Path, place: RankPlace) -> Arrays:
    """Two steps in one go, with a checkpoint after the first."""
    learner = make_learner(folder, place, model="qwen", micro_batch_tokens=25, warmup_steps=5)
    learner.step(make_batch(0))
    learner.save(folder / f"checkpoint-{place.world_size}")
    learner.step(make_batch(1))
    found = weights(learner)
    learner.close()
    return found


def resume(folder: Path, place: RankPlace) -> Arrays:
    """The second of these steps, from the checkpoint of two ranks, whatever the number of ranks is now."""
    learner = make_learner(folder, place, model="qwen", micro_batch_tokens=25, warmup_steps=5)
    learner.load(folder / "checkpoint-2")
    version = learner.version
    learner.step(make_batch(1))
    found = weights(learner)
    learner.close()
    return found | {"version": np.array(version)}


def run(name: str, folder: Path, place: RankPlace) -> Arrays:
    """One scenario by name."""
    if name in STEPS:
        return one_step(folder, place, **STEPS[name])
    scenarios = {s.__name__: s for s in (lone_sequence, bad_steps, overlap, save_after_one, resume)}
    return scenarios[name](folder, place)


def main() -> None:
    folder, rank, world, port, *names = sys.argv[1:]
    torch.set_num_threads(1)
    place = RankPlace(rank=int(rank), world_size=int(world), port=int(port), deadline_s=100)
    # One meeting for all scenarios: a learner that finds the processes already met does not end that.
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=100),
    )
    for name in names:
        np.savez(Path(folder) / f"{name}-{rank}-of-{world}.npz", **run(name, Path(folder), place))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
