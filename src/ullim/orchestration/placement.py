"""Where processes run: Ray, one machine or many, and the actors behind the controller's peers.

The only place that knows Ray. With RAY_ADDRESS set the run joins that cluster; otherwise Ray starts on this
machine and ends with the run. Node counts and threads are the only difference between the two.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from ullim.config.run import Recipe
from ullim.errors import RunFailed
from ullim.orchestration.learners import LearnerRank, LearnerSpec
from ullim.orchestration.node import InferenceNode, NodeSpec
from ullim.orchestration.peers import LearnerDied, NodeCounters, PeerDied, RolloutTask
from ullim.records import LearnerBatch, RolloutGroup, StepReport
from ullim.weights.manifest import WeightManifest
from ullim.weights.session import SessionAddress, TransferStats

OBJECT_STORE_BYTES = 256 * 2**20
"""Batches and groups are a few MiB; Ray's default would reserve a third of the machine."""


@dataclass(frozen=True, slots=True)
class Threads:
    """CPU threads of one process of each kind."""

    node: int
    learner: int


def share_threads(recipe: Recipe, cores: int) -> Threads:
    """Divide a machine's cores: among all processes in `async` mode; all to each in `sync` mode, where they
    take turns. What the recipe sets is kept."""
    processes = 1 if recipe.loop.mode == "sync" else recipe.nodes.count + recipe.learner.ranks
    share = max(1, cores // processes)
    return Threads(node=recipe.nodes.threads or share, learner=recipe.learner.threads or share)


@contextlib.contextmanager
def ray_session() -> Iterator[str]:
    """Ray for the time of the block; yields where its logs are. Joins RAY_ADDRESS if that is set."""
    cluster = os.environ.get("RAY_ADDRESS")
    # Ray starts its workers at the lowest priority; ours are the work itself, and would starve beside a browser.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Workers of a run die with it; their output goes to Ray's log folder and their errors come back as exceptions.
    common = {"log_to_driver": False, "logging_level": "error", "namespace": "ullim"}
    if cluster:
        context = ray.init(address=cluster, **common)
    else:
        context = ray.init(
            address="local",
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **common,
        )
    try:
        yield str(context.address_info.get("session_dir", "Ray's session folder"))
    finally:
        ray.shutdown()


def on_cluster() -> bool:
    """The run spans machines, so processes meet at their machines' addresses, not on loopback."""
    return bool(os.environ.get("RAY_ADDRESS"))


class RayNode:
    """An inference node behind a Ray actor."""

    def __init__(self, spec: NodeSpec, gpus: float) -> None:
        self._name = spec.name
        self._actor = _actor(InferenceNode, spec.threads, gpus, max_concurrency=1000).remote(spec)

    @classmethod
    async def launch(cls, spec: NodeSpec, gpus: float) -> "RayNode":
        """Start the process and return once its engine and reward models are loaded."""
        node = cls(spec, gpus)
        await _answer(spec.name, node._actor.start.remote())
        return node

    async def rollout(self, task: RolloutTask) -> RolloutGroup:
        return await _answer(self._name, self._actor.rollout.remote(task))  # type: ignore[no-any-return]

    async def join(self, address: SessionAddress, manifest: WeightManifest) -> None:
        await _answer(self._name, self._actor.join.remote(address, manifest))

    async def receive(self, version: int) -> None:
        await _answer(self._name, self._actor.receive.remote(version))

    async def clear(self) -> None:
        await _answer(self._name, self._actor.clear.remote())

    async def sleep(self) -> None:
        await _answer(self._name, self._actor.sleep.remote())

    async def wake(self) -> None:
        await _answer(self._name, self._actor.wake.remote())

    async def counters(self) -> NodeCounters:
        return await _answer(self._name, self._actor.counters.remote())  # type: ignore[no-any-return]

    async def pid(self) -> int:
        return await _answer(self._name, self._actor.pid.remote())  # type: ignore[no-any-return]

    async def close(self) -> None:
        await _answer(self._name, self._actor.close.remote())

    def kill(self) -> None:
        ray.kill(self._actor)


class RayLearners:
    """All learner ranks, an actor each. Calls go to every rank at once, since every step is a collective."""

    def __init__(self, spec: LearnerSpec, ranks: int, gpus: float) -> None:
        options = {"concurrency_groups": {"publish": 1, "control": 1}}
        self._actors = [
            _actor(LearnerRank, spec.threads, gpus, **options).remote(spec, rank, ranks) for rank in range(ranks)
        ]
        self.manifest: WeightManifest

    @classmethod
    async def launch(cls, spec: LearnerSpec, ranks: int, gpus: float) -> "RayLearners":
        """Start every rank and return once the model is loaded and sharded."""
        learners = cls(spec, ranks, gpus)
        host, port = await learners._one("rendezvous", on_cluster())
        learners.manifest = (await learners._every("start", host, port))[0]
        return learners

    async def step(self, batch: LearnerBatch, publication: int) -> StepReport:
        return (await self._every("step", ray.put(batch), publication))[0]  # type: ignore[no-any-return]

    async def allow_update(self, publication: int) -> None:
        await self._every("allow_update", publication, group="control")

    async def open_session(self, receivers: Sequence[str]) -> Mapping[str, SessionAddress]:
        return await self._one("open_session", tuple(receivers), group="publish")  # type: ignore[no-any-return]

    async def publish(self, version: int) -> TransferStats:
        return (await self._every("publish", version, group="publish"))[0]  # type: ignore[no-any-return]

    async def save(self, directory: Path) -> None:
        await self._every("save", directory)

    async def load(self, directory: Path) -> None:
        await self._every("load", directory)

    async def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    async def _every(self, method: str, *args: Any, group: str | None = None) -> list[Any]:
        """Call all ranks and wait for all. A rank that dies leaves the others in a collective: fail at once."""
        calls = [self._call(rank, method, args, group) for rank in range(len(self._actors))]
        return await asyncio.gather(*calls)

    async def _one(self, method: str, *args: Any, group: str | None = None) -> Any:
        return await self._call(0, method, args, group)

    async def _call(self, rank: int, method: str, args: Sequence[Any], group: str | None) -> Any:
        bound = getattr(self._actors[rank], method)
        bound = bound.options(concurrency_group=group) if group else bound
        try:
            return await _answer(f"learner-{rank}", bound.remote(*args))
        except PeerDied as death:
            raise LearnerDied(death.peer, death.detail) from None


def _actor(cls: type, threads: int, gpus: float, **options: Any) -> Any:
    """An actor class with its share of the machine. Cores are shared by intent, so Ray is asked for none on one
    machine; on a cluster each process asks for its threads, so that Ray spreads them."""
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        # A user's reward functions are imported by name, so workers look where the command was typed.
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])),
    }
    return ray.remote(
        num_cpus=threads if on_cluster() else 0,
        num_gpus=gpus,
        scheduling_strategy="SPREAD",
        runtime_env={"env_vars": environment},
        **options,
    )(cls)


async def _answer(peer: str, reference: Any) -> Any:
    """What the peer returns; its own error as it was raised; PeerDied if its process or machine is gone."""
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, Exception) else RunFailed(f"{peer}: {error}") from error
    except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
        raise PeerDied(peer, str(error).splitlines()[0]) from None
