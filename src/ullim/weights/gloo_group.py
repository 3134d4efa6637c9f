"""A gloo process group of our own, whose waits have deadlines and know whom to name.

It never touches torch's default group, which FSDP uses in the same process, and keeps no global state: any number of
groups may live in one process, each used by one thread at a time.
"""

import socket
import threading
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroupGloo, TCPStore, Work  # type: ignore[attr-defined]

from ullim.weights.lines import listen
from ullim.weights.session import TransferFailed

LOOK_UP_S = 0.1
"""How often a wait for a chunk looks at the control lines. A chunk that arrives ends the wait at once."""

SENDER_RANK = 0


class Watch(Protocol):
    """Whom to ask while a chunk is on its way."""

    def look(self) -> None:
        """Read the control lines without waiting; raise TransferFailed if they say that it is over."""
        ...

    def blame(self, trouble: str) -> TransferFailed:
        """The error for a stream that broke or stands still, naming who caused it."""
        ...


class GlooChunk:
    """A broadcast under way; a `packed.Pending`."""

    def __init__(self, work: Work, watch: Watch, deadline_s: float) -> None:
        self._work = work
        self._watch = watch
        self._deadline_s = deadline_s

    def wait(self) -> None:
        """Return once the chunk is through. Raises TransferFailed if it breaks, or is not within the deadline."""
        started = time.monotonic()
        while not self._work.is_completed():
            self._watch.look()
            waited = time.monotonic() - started
            if waited > self._deadline_s:
                raise self._watch.blame(f"no chunk got through for {waited:.1f} s")
            try:
                self._work.wait(timedelta(seconds=LOOK_UP_S))
            except RuntimeError:
                continue  # it timed out, or failed: which of the two, `is_completed` tells for certain
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._watch.blame(f"the connection broke ({_first_line(error)})") from error
        self._watch.look()


class GlooGroup:
    """Sender and receivers of one session, joined pairwise over the network that `host` (an own address) belongs to."""

    def __init__(self, store: TCPStore, rank: int, size: int, host: str, deadline_s: float) -> None:
        """Blocks until all `size` members do the same; RuntimeError after the deadline."""
        self._deadline_s = deadline_s
        gloo: Any = ProcessGroupGloo  # its stubs know neither options nor operations
        options = gloo._Options()  # the only way to choose the interface other than by an environment variable
        options._devices = [gloo.create_device(hostname=host)]
        # Gloo's own limit must be the later one: where it strikes, the error cannot name anybody.
        options._timeout = timedelta(seconds=deadline_s + 5.0)
        self._held: list[Any] = [store, gloo(store, rank, size, options)]

    def start(self, chunk: torch.Tensor, watch: Watch) -> GlooChunk:
        """Begin to broadcast `chunk` (contiguous uint8, CPU) from the sender, or to receive it into `chunk`."""
        try:
            return GlooChunk(self._held[1].broadcast(chunk, SENDER_RANK), watch, self._deadline_s)
        except RuntimeError as error:
            raise watch.blame(f"the connection broke ({_first_line(error)})") from error

    def release(self) -> None:
        """Give the group up. A broadcast that nobody will finish keeps its buffer until gloo's own limit has passed.

        Gloo cannot cancel it, and destroying the group waits for it: hence the thread.
        """
        held, self._held = self._held, []
        threading.Thread(target=held.clear, name="ullim-gloo-release", daemon=True).start()


def host_store(host: str, deadline_s: float) -> TCPStore:
    """The sender's store, through which the group's members find each other; listens on `host` only, on a free port.

    Left to itself a TCPStore listens on every interface of the machine.
    """
    listener = listen(host, 0, backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, timeout=timedelta(seconds=deadline_s), wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def join_store(host: str, port: int, deadline_s: float) -> TCPStore:
    """A receiver's view of the sender's store."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=deadline_s), wait_for_workers=False)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
