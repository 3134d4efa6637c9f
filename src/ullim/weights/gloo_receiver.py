"""An engine's end of weights over CPU networks. The talk between the two ends is drawn in `gloo_sender.py`."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import torch

from ullim.weights.cuts import plan_cuts
from ullim.weights.gloo_group import GlooChunk, GlooGroup, join_store
from ullim.weights.lines import LineClosed, Message, connect
from ullim.weights.manifest import WeightManifest
from ullim.weights.packed import fit_buffers, unpack
from ullim.weights.roster import GRACE_S
from ullim.weights.session import SessionAddress, TransferFailed


class WeightReceiver:
    """An engine's end of a session; a `transport.Receiver`.

    The constructor joins by name and returns at once; the group forms in the first `receive`. Raises TransferFailed
    naming the sender where nobody listens at `address` within the deadline.
    """

    def __init__(self, address: SessionAddress, *, deadline_s: float, buffers: int = 2) -> None:
        self._address = address
        self._deadline_s = deadline_s
        # Longer than the sender's, so that its verdict, which names who held the stream up, comes first.
        self._patience_s = deadline_s + 2 * GRACE_S
        self._buffer_count = buffers
        self._buffers: list[torch.Tensor] = []
        self._group: GlooGroup | None = None
        self._inbox: deque[Message] = deque()
        self._chunks = 0
        self._receiving = False
        self._echo = False  # the failure was seen here but is another's
        self._over: str | None = None
        try:
            self._line = connect(address.host, address.port, deadline_s)
            self._line.say("hello", session=address.session, name=address.receiver)
        except LineClosed as error:
            raise self._failed(f"cannot reach {address} ({error})") from error

    def receive(self, manifest: WeightManifest, version: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """See `transport.Receiver.receive`. With `version` given, weights of any other version are refused.

        Works when first iterated, not when called. Leaving the iteration early ends the session.
        """
        if self._over is not None:
            raise TransferFailed(f"weights: this session is over ({self._over}); join a new one")
        if self._receiving:
            raise RuntimeError("another receive() of this session has not ended")
        self._receiving = True
        try:
            yield from self._receive(manifest, version)
        except GeneratorExit:
            self._end("stopped taking weights before the end")
            raise
        except BaseException as error:
            self._end(str(error) or type(error).__name__)
            raise
        finally:
            self._receiving = False

    def close(self) -> None:
        """Leave the session. A transfer under way fails at the sender, which names this receiver."""
        self._end("left the session")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def look(self) -> None:
        self._pump(0.0)

    def blame(self, trouble: str) -> TransferFailed:
        """Say that the stream broke here, and let the sender, who sees everybody, say whose fault it was."""
        self._echo = True
        try:
            self._say("fault", reason=trouble, echo=True)
            until = time.monotonic() + 2 * GRACE_S
            while time.monotonic() < until:
                self._pump(until - time.monotonic())
        except TransferFailed as verdict:
            return verdict
        return self._failed(trouble)

    def _receive(self, manifest: WeightManifest, version: int | None) -> Iterator[tuple[str, torch.Tensor]]:
        group = self._group or self._meet()
        header = self._hear("header")
        digest = manifest.digest
        self._say("ready", digest=digest)
        if header["digest"] != digest:
            raise self._failed(
                f"{self._address} sends another manifest (digest {header['digest'][:12]}, ours is {digest[:12]}): both "
                f"ends must use one model, one dtype and one buffer_bytes"
            )
        if version is not None and header["version"] != version:
            raise self._failed(f"version {header['version']} came where {version} was due")
        fit_buffers(self._buffers, plan_cuts(manifest), self._buffer_count)
        self._chunks = 0  # taken of this transfer
        arrived = yield from unpack(
            manifest,
            lambda chunk: _Counted(group.start(chunk, self), self._count),
            self._buffers,
            checked=header["checksum"],
        )
        sent = self._hear("trailer")["checksums"]
        checked = manifest.entries if header["checksum"] else ()
        wrong = [entry.name for entry, mine, its in zip(checked, arrived, sent, strict=True) if mine != its]
        if wrong:
            raise self._failed(f"checksum of {wrong[0]!r} differs ({len(wrong)} tensors do)")
        self._say("confirm", digest=digest)

    def _meet(self) -> GlooGroup:
        meeting = self._hear("group")
        own_host = self._line.connection.getsockname()[0]  # the interface from which the sender can be reached
        try:
            store = join_store(self._address.host, meeting["port"], self._deadline_s)
        except RuntimeError as error:
            raise self.blame(f"no connection to the store ({error})") from error
        self._say("here")
        self._group = GlooGroup(store, self._address.rank, meeting["size"], own_host, self._patience_s, self)
        return self._group

    def _count(self) -> None:
        self._chunks += 1
        self._say("chunk", chunks=self._chunks)

    def _hear(self, kind: str) -> Message:
        """The next message, which must be of this kind."""
        until = time.monotonic() + self._patience_s
        while not self._inbox:
            if time.monotonic() >= until:
                raise self.blame(f"no {kind!r} from {self._address} within {self._patience_s:g} s")
            self._pump(until - time.monotonic())
        message = self._inbox.popleft()
        if message["kind"] != kind:
            raise self._failed(f"{self._address} said {message['kind']!r} where {kind!r} was due")
        return message

    def _pump(self, timeout_s: float) -> None:
        """Take in what the sender has said, waiting at most so long for the first word."""
        try:
            while (message := self._line.hear(timeout_s)) is not None:
                timeout_s = 0.0
                match message["kind"]:
                    case "ping":
                        self._line.say("pong")
                    case "abort" | "refused":
                        self._echo = True
                        raise TransferFailed(f"{self._address}: {message['reason']}", message.get("peers", ()))
                    case _:
                        self._inbox.append(message)
        except LineClosed as error:
            raise self._failed(f"{self._address} is gone ({error})") from error

    def _say(self, kind: str, **fields: Any) -> None:
        try:
            self._line.say(kind, **fields)
        except LineClosed as error:
            self._pump(0.0)  # it may have said why before it hung up
            raise self._failed(f"{self._address} is gone ({error})") from error

    def _failed(self, trouble: str) -> TransferFailed:
        return TransferFailed(f"weights for {self._address.receiver}: {trouble}", (self._address.sender,))

    def _end(self, reason: str) -> None:
        if self._over is None:
            self._over = reason
            with contextlib.suppress(LineClosed):
                self._line.say("fault", reason=reason, echo=self._echo)
            self._line.close()
            self._buffers = []
            if self._group is not None:
                self._group.release()


class _Counted:
    """A chunk under way that is reported once it has arrived."""

    def __init__(self, chunk: GlooChunk, arrived: Callable[[], None]) -> None:
        self._chunk = chunk
        self._arrived = arrived

    def wait(self) -> None:
        self._chunk.wait()
        self._arrived()
