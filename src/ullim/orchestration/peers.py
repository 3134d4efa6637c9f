"""What the controller needs of nodes and learners, whatever carries the calls.

Ray's actors (`placement.py`) are one implementation; unit tests use plain objects in the same process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ullim.errors import RunFailed
from ullim.records import LearnerBatch, Prompt, RolloutGroup, StepReport
from ullim.weights.manifest import WeightManifest
from ullim.weights.session import SessionAddress, TransferStats


class PeerDied(RunFailed):
    """A process is gone; `peer` is its name. Nodes are restarted within a budget."""

    def __init__(self, peer: str, detail: str) -> None:
        super().__init__(f"{peer} died: {detail}")
        self.peer = peer
        self.detail = detail


class LearnerDied(PeerDied):
    """A learner rank is gone; what the optimiser knew is in the checkpoints."""


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """One group to generate and score."""

    ticket: int
    prompt: Prompt
    group_size: int
    seed: int


@dataclass(frozen=True, slots=True)
class NodeCounters:
    """A node's totals since its start; the controller takes differences."""

    version: int
    running: int
    waiting: int
    generated_tokens: int
    generate_busy_s: float
    score_busy_s: float


class Node(Protocol):
    """One inference node. A call to a dead node raises PeerDied; any other error is a bug and ends the run."""

    async def rollout(self, task: RolloutTask) -> RolloutGroup: ...

    async def join(self, address: SessionAddress, manifest: WeightManifest) -> None:
        """Enter a transfer session, leaving an earlier one."""
        ...

    async def receive(self, version: int) -> None:
        """Pause, take one set of weights through the session, resume. On failure the old weights stay."""
        ...

    async def clear(self) -> None:
        """End everything that is being generated."""
        ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def counters(self) -> NodeCounters: ...

    async def close(self) -> None: ...

    def kill(self) -> None:
        """End the process at once, without asking it."""
        ...


class Learners(Protocol):
    """All learner ranks as one. A dead rank raises LearnerDied."""

    @property
    def manifest(self) -> WeightManifest:
        """What a publication consists of."""
        ...

    async def step(self, batch: LearnerBatch, publication: int) -> StepReport:
        """One version step. The optimiser moves only after `allow_update(publication)`."""
        ...

    async def allow_update(self, publication: int) -> None:
        """The weights of version `publication` have been sent (or given up): parameters may change."""
        ...

    async def open_session(self, receivers: Sequence[str]) -> Mapping[str, SessionAddress]:
        """A new transfer session for the named nodes; the address each of them joins by."""
        ...

    async def publish(self, version: int) -> TransferStats: ...

    async def save(self, directory: Path) -> None: ...

    async def load(self, directory: Path) -> None: ...

    async def close(self) -> None: ...
