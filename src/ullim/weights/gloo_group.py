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

    def __init__(self, store: TCPStore, rank: int, size: int, host: str, deadline_s: float, watch: Watch) -> None:
        """Blocks until all `size` members do the same; TransferFailed where that takes longer than the deadline."""
        self._deadline_s = deadline_s
        gloo: Any = ProcessGroupGloo  # its stubs know neither options nor operations
        options = gloo._Options()  # the only way to choose the interface other than by an environment variable
        options._devices = [gloo.create_device(hostname=host)]
        # Gloo's own limit must be the later one: where it strikes, the error cannot name anybody.
        options._timeout = timedelta(seconds=deadline_s + 5.0)
        self._held: list[Any] = [store]
        self._under_way: list[Work] = []
        trouble: list[RuntimeError] = []

        def meet() -> None:
            try:
                self._held.append(gloo(store, rank, size, options))
            except RuntimeError as error:
                trouble.append(error)

        # In a thread, because a member that dies just now keeps gloo waiting for minutes, whatever its limit says.
        meeting = threading.Thread(target=meet, name="ullim-gloo-meet", daemon=True)
        started = time.monotonic()
        meeting.start()
        while meeting.is_alive():
            meeting.join(LOOK_UP_S)
            watch.look()
            if time.monotonic() - started > deadline_s:
                raise watch.blame(f"no connection within {deadline_s:g} s")
        if trouble:
            raise watch.blame(f"no connection ({_first_line(trouble[0])})") from trouble[0]

    def start(self, chunk: torch.Tensor, watch: Watch) -> GlooChunk:
        """Begin to broadcast `chunk` (contiguous uint8, CPU) from the sender, or to receive it into `chunk`."""
        try:
            work = self._held[1].broadcast(chunk, SENDER_RANK)
        except RuntimeError as error:
            raise watch.blame(f"the connection broke ({_first_line(error)})") from error
        self._under_way = [*(earlier for earlier in self._under_way if not earlier.is_completed()), work]
        return GlooChunk(work, watch, self._deadline_s)

    def release(self) -> None:
        """Give the group up, without waiting.

        Gloo cannot cancel a broadcast, and destroying its group waits for it. One that nobody will finish therefore
        keeps group and buffer until gloo's own limit has passed, or to the end of the process if that comes first.
        """
        held, self._held = self._held, []
        under_way, self._under_way = self._under_way, []

        def let_go() -> None:
            while not all(work.is_completed() for work in under_way):
                time.sleep(LOOK_UP_S)
            held.clear()

        if all(work.is_completed() for work in under_way):
            held.clear()
        else:
            threading.Thread(target=let_go, name="ullim-gloo-release", daemon=True).start()


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
