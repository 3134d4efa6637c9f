"""LearnerRank: one rank of the learners, as a process of its own.

A plain class; `placement.py` makes a Ray actor of it with three threads: `step` and checkpoints compute in one,
`publish` streams in another while a step runs, and `allow_update` must get through to a step that waits.
"""

import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from ray.util import get_node_ip_address

from ullim.config.learner import LearnerConfig
from ullim.config.objective import ObjectiveConfig
from ullim.config.policy import PolicyConfig
from ullim.errors import RunFailed
from ullim.learner.learner import Learner
from ullim.learner.ranks import RankPlace
from ullim.records import LearnerBatch, StepReport
from ullim.weights.gloo_sender import WeightSender
from ullim.weights.manifest import WeightManifest
from ullim.weights.session import SessionAddress, TransferStats

PUBLICATION_DEADLINES = 4
"""`weights.deadline_s` bounds one wait for one peer; joining, sending and confirming are several in a row."""

UPDATE_DEADLINES = 20
"""A publication may be tried several times before the optimiser is allowed to move."""


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """All that a rank needs to start anywhere; small and picklable."""

    policy: PolicyConfig
    learner: LearnerConfig
    objective: ObjectiveConfig
    temperature: float
    max_new_tokens: int
    threads: int
    device: str
    seed: int
    bad_samples_path: str
    engine_dtype: str
    buffer_bytes: int
    transfer_bind: str | None
    transfer_checksum: bool
    transfer_deadline_s: float


class LearnerRank:
    """One rank. `start` is a collective: every rank's must run at once."""

    def __init__(self, spec: LearnerSpec, rank: int, ranks: int) -> None:
        torch.set_num_threads(spec.threads)
        self._spec = spec
        self._rank = rank
        self._ranks = ranks
        self._learner: Learner | None = None
        self._manifest = WeightManifest((), (), spec.buffer_bytes)
        self._host = "127.0.0.1"
        self._awaited = -1  # publication that the running step's optimiser waits for
        self._sender: WeightSender | None = None
        self._permit = UpdatePermit(UPDATE_DEADLINES * spec.transfer_deadline_s)

    def rendezvous(self, on_cluster: bool) -> tuple[str, int]:
        """Where the ranks meet: this machine's address and a free port."""
        self._host = get_node_ip_address() if on_cluster else "127.0.0.1"
        with socket.socket() as probe:
            probe.bind((self._host, 0))
            return self._host, int(probe.getsockname()[1])

    def start(self, host: str, port: int) -> WeightManifest:
        """Load and shard the policy; returns what a publication of it consists of."""
        spec = self._spec
        self._learner = Learner(
            spec.policy,
            spec.learner,
            spec.objective,
            temperature=spec.temperature,
            max_new_tokens=spec.max_new_tokens,
            place=RankPlace(self._rank, self._ranks, host, port, spec.device),
            seed=spec.seed,
            bad_samples=spec.bad_samples_path,
            before_update=lambda: self._permit.wait(self._awaited),
        )
        self._manifest = self._learner.manifest(getattr(torch, spec.engine_dtype), spec.buffer_bytes)
        return self._manifest

    def step(self, batch: LearnerBatch, publication: int) -> StepReport:
        """One version step; its optimiser moves once `allow_update(publication)` was called."""
        self._awaited = publication
        return self._started.step(batch)

    def allow_update(self, publication: int) -> None:
        self._permit.give(publication)

    def open_session(self, receivers: Sequence[str]) -> Mapping[str, SessionAddress]:
        """Rank 0: end the last session and listen for `receivers`."""
        if self._sender is not None:
            self._sender.close()
        spec = self._spec
        self._sender = WeightSender(
            receivers,
            deadline_s=spec.transfer_deadline_s,
            host=spec.transfer_bind or self._host,
            checksum=spec.transfer_checksum,
        )
        return dict(self._sender.addresses)

    def publish(self, version: int) -> TransferStats | None:
        """All ranks: gather parameter after parameter; rank 0 sends them and returns how it went."""
        publication = self._started.publish(self._sender, self._manifest)
        if publication.version != version:
            raise RuntimeError(f"version {version} was to be published, the learner is at {publication.version}")
        publication.wait(PUBLICATION_DEADLINES * self._spec.transfer_deadline_s)
        return publication.stats

    def save(self, directory: Path) -> None:
        self._started.save(directory)

    def load(self, directory: Path) -> None:
        self._started.load(directory)

    @property
    def _started(self) -> Learner:
        if self._learner is None:
            raise RuntimeError(f"learner-{self._rank} was used before start()")
        return self._learner


class UpdatePermit:
    """Lets the optimiser move only after the parameters it would change have been sent."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._given = -1
        self._changed = threading.Condition()

    def give(self, publication: int) -> None:
        with self._changed:
            self._given = max(self._given, publication)
            self._changed.notify_all()

    def wait(self, publication: int) -> None:
        """Return once `give(publication)` or a later one was called; RunFailed at the deadline."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._given >= publication, self._deadline_s):
                raise RunFailed(
                    f"the optimiser waited {self._deadline_s:g} s for the publication of version {publication} "
                    f"and was never told that it is over; the controller is gone or stuck"
                )
