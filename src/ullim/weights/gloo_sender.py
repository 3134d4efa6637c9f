"""The learner's end of weights over CPU networks: the packed stream as gloo broadcasts, steered over control lines.

    sender                                              receiver "node-0", "node-1", ...
      |  <----------- hello (joins by name) ------------  |
      |  ------------ group (where to meet) ----------->  |   once per session
      |  <----------- here ------------------------------  |
      |  ------------ header (version, digest) -------->  |
      |  <----------- ready (digest) -------------------  |   nothing is sent before the digests agree
      |  ============ chunks, broadcast by gloo =======>  |   each said to have arrived
      |  ------------ trailer (checksums) ------------->  |
      |  <----------- confirm --------------------------  |   once the engine has taken every tensor

Any failure ends the session at both ends, each told why. `deadline_s` bounds every single wait (for one peer to join,
to answer, to take one chunk), not the transfer as a whole: how long that takes depends on the model.
"""

import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

import torch

from ullim.weights.cuts import plan_cuts
from ullim.weights.gloo_group import SENDER_RANK, GlooGroup, host_store
from ullim.weights.manifest import WeightManifest
from ullim.weights.packed import fit_buffers, pack
from ullim.weights.roster import Roster
from ullim.weights.session import SessionAddress, TransferFailed, TransferStats

LINGER_S = 0.5
"""How long a failed sender waits for the receivers to have read why."""


class WeightSender:
    """The learner's end of a session; a `transport.Sender`.

    The constructor only listens. Hand `addresses[name]` to each receiver, then `send`: the first one waits for all to
    join. `host` is the one address that is listened on and that receivers must reach; port 0 takes a free port.
    Raises BadInput on names that are not distinct or an address that cannot be listened on.
    """

    def __init__(
        self, receivers: Sequence[str], *, deadline_s: float, host: str = "127.0.0.1", port: int = 0,
        buffers: int = 2, checksum: bool = True, name: str = "learner",
    ) -> None:  # fmt: skip
        self._roster = Roster(name, host, port, receivers, deadline_s)
        self._host = host
        self._deadline_s = deadline_s
        self._buffer_count = buffers
        self._checksum = checksum
        self._group: GlooGroup | None = None
        self._buffers: list[torch.Tensor] = []
        self._over: str | None = None

    @property
    def addresses(self) -> dict[str, SessionAddress]:
        """Receiver name -> how it joins."""
        return dict(self._roster.addresses)

    def send(
        self, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> TransferStats:
        """See `transport.Sender.send`. The buffers are kept for the next transfer until `close`."""
        if self._over is not None:
            raise TransferFailed(f"weights: this session is over ({self._over}); open a new one")
        try:
            return self._send(manifest, tensors, version)
        except BaseException as error:  # whatever it was, the receivers must not wait for the rest
            self._end(str(error) or type(error).__name__, getattr(error, "peers", ()), linger_s=LINGER_S)
            raise

    def close(self) -> None:
        """End the session. Receivers that still listen are told."""
        self._end("the sender closed the session", (), linger_s=0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def look(self) -> None:
        self._roster.look()

    def blame(self, trouble: str) -> TransferFailed:
        return self._roster.blame(trouble)

    def _send(
        self, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> TransferStats:
        group = self._group or self._meet()
        started = time.perf_counter()
        digest = manifest.digest
        self._roster.begin(f"sending version {version}")
        self._roster.tell("header", version=version, digest=digest, checksum=self._checksum)
        answers = self._roster.expect("ready")
        odd = [name for name, answer in answers.items() if answer["digest"] != digest]
        if odd:
            raise TransferFailed(
                f"weights: {', '.join(odd)} expects another manifest (digest {answers[odd[0]]['digest'][:12]}, ours is "
                f"{digest[:12]}): both ends must use one model, one dtype and one buffer_bytes", odd,
            )  # fmt: skip
        agreed = time.perf_counter()
        fit_buffers(self._buffers, plan_cuts(manifest), self._buffer_count)
        report = pack(manifest, tensors, lambda chunk: group.start(chunk, self), self._buffers, checked=self._checksum)
        packed = time.perf_counter()
        self._roster.tell("trailer", checksums=report.checksums)
        self._roster.expect("confirm")
        done = time.perf_counter()
        return TransferStats(
            version=version,
            bytes=manifest.nbytes,
            seconds=done - started,
            agree_s=agreed - started,
            gather_s=report.gather_s,
            pack_s=report.pack_s,
            send_s=report.send_s,
            confirm_s=done - packed,
        )

    def _meet(self) -> GlooGroup:
        self._roster.join()
        store = host_store(self._host, self._deadline_s)
        size = 1 + len(self._roster.members)
        self._roster.begin("opening the session")
        self._roster.tell("group", port=store.port, size=size)
        self._roster.expect("here")
        self._group = GlooGroup(store, SENDER_RANK, size, self._host, self._deadline_s, self)
        return self._group

    def _end(self, reason: str, peers: Sequence[str], linger_s: float) -> None:
        if self._over is None:
            self._over = reason
            self._roster.close(reason, peers, linger_s)
            self._buffers = []
            if self._group is not None:
                self._group.release()
