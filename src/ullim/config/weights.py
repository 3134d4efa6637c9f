"""Weight transfer from learner to nodes."""

from pydantic import Field

from ullim.config.base import Section


class WeightsConfig(Section):
    """The packed stream."""

    buffer_bytes: int = Field(default=64 * 2**20, ge=1024)
    """Size of each of the two buffers; both ends use this one value. 1 GiB suits GPUs, tens of MiB a CPU."""

    deadline_s: float = Field(default=120.0, gt=0)
    """Longest wait for any peer within a transfer."""

    checksum: bool = True
    """A checksum per tensor, verified before the engine takes the weights."""

    attempts: int = Field(default=3, ge=1)
    """Tries of one publication (nodes that died are left out and restarted) before the run fails."""

    bind: str | None = None
    """Address on which the learner waits for nodes. None: loopback when Ray was started by the run, and on a cluster
    (RAY_ADDRESS is set) the address that Ray knows the learner's machine by. The stream is not encrypted."""
