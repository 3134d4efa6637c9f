"""What is said about a transfer session: where its members meet, how a transfer went, and that one failed.

A session is one sender and a fixed set of named receivers. It carries any number of transfers, one after another, and
ends with the first that fails, so that nothing half-sent can reach the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ullim.errors import RunFailed


class TransferFailed(RunFailed):
    """A set of weights did not arrive everywhere. `peers` are the names of those at fault, where that is known.

    The session that raised it is over: close it, leave out or restart those peers, and open a new one.
    """

    def __init__(self, message: str, peers: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


@dataclass(frozen=True, slots=True)
class SessionAddress:
    """How one receiver joins: where the sender listens, and who the receiver is there. Small and picklable.

    `session` keeps strays and members of an earlier session out. It is no secret against an attacker: the network is
    trusted, and neither control line nor stream is encrypted.
    """

    host: str
    port: int
    session: str
    sender: str
    receiver: str
    rank: int  # in the process group, 1 .. number of receivers; the sender is 0

    def __str__(self) -> str:
        return f"{self.sender} at {self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TransferStats:
    """One transfer as its sender saw it. The five parts do not overlap and add up to `seconds` but for trifles.

    `agree_s`: until every receiver was there and held the same manifest; `gather_s`: waiting for the caller's next
    tensor; `pack_s`: casting, copying and checking into a buffer; `send_s`: waiting for a buffer to be sent, which is
    what packing did not hide; `confirm_s`: from the last byte until every receiver had loaded and confirmed.
    """

    version: int
    bytes: int  # of tensors, without padding
    seconds: float
    agree_s: float
    gather_s: float
    pack_s: float
    send_s: float
    confirm_s: float
