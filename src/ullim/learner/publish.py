"""Streaming the weights out while the next step already computes.

    publish(v) ─▶ thread: gather ▶ send ▶ gather ▶ send ... ─▶ done
    step v+1   ─▶ forward ▶ backward ▶ forward ▶ backward ... ─▶ wait ─▶ optimiser moves

The sharded float32 weights stand still from one optimiser update to the next, whatever forward and backward passes run,
so a second thread may read them without copying. It gathers over a process group of its own; the training step only has
to wait for it where the weights are about to move.
"""

import threading
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ullim.errors import RunFailed
from ullim.learner.ranks import Ranks
from ullim.weights.manifest import WeightManifest
from ullim.weights.session import TransferStats
from ullim.weights.transport import Sender

Weights = Iterator[tuple[str, Tensor]]


class Publication:
    """One running or ended transfer, on one rank. `stats` are the sender's: on rank 0, once it has succeeded.

    RUNNING --last weight read--> STILL --receivers confirmed--> ENDED. A failed transfer goes to both at once.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.stats: TransferStats | None = None
        self.error: BaseException | None = None
        self._still = threading.Event()
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        """Whether the transfer is over, well or not."""
        return self._ended.is_set()

    def wait(self, deadline_s: float) -> None:
        """Return once the transfer has ended well; raises its own error, or RunFailed after `deadline_s` seconds."""
        self._await(self._ended, deadline_s)
        if self.error is not None:
            raise self.error

    def wait_until_ended(self, deadline_s: float) -> None:
        """Return once the transfer is over, even if it failed; RunFailed at the deadline."""
        self._await(self._ended, deadline_s)

    def wait_until_still(self, deadline_s: float) -> None:
        """Return once the weights are no longer read, even if the transfer failed; RunFailed at the deadline."""
        self._await(self._still, deadline_s)

    def run(self, send: Callable[[Weights], TransferStats | None], weights: Weights) -> None:
        """Send the weights, and keep the outcome for whoever waits."""
        reading = self._reading(weights)
        try:
            self.stats = send(reading)
        except BaseException as error:  # kept for `wait`, in the thread that can act on it
            self.error = error
        try:
            # Whether or not the sender took them all: the other ranks go through every gather.
            for _ in reading:
                pass
        except BaseException as error:
            self.error = self.error or error
        finally:
            self._still.set()
            self._ended.set()

    def _reading(self, weights: Weights) -> Weights:
        yield from weights
        self._still.set()

    def _await(self, event: threading.Event, deadline_s: float) -> None:
        if not event.wait(deadline_s):
            raise RunFailed(
                f"publication of version {self.version} was still running after {deadline_s:g} s, and the weights "
                "cannot move while they are being sent; look at the nodes that receive them"
            )


class Publisher:
    """Publishes the sharded weights of one rank; every rank has one and calls it alike."""

    def __init__(self, weights: Mapping[str, Tensor], ranks: Ranks) -> None:
        self._weights, self._ranks = dict(weights), ranks
        self._running: Publication | None = None

    def publish(self, sender: Sender | None, manifest: WeightManifest, version: int) -> Publication:
        """Begin to send the weights as they are now, as `version`; returns at once.

        Args:
            sender: on rank 0; None on the others, and None there too to gather without sending.
            manifest: of these weights; its dtypes are what is gathered and sent.
            version: label of the weights.

        Raises:
            RunFailed: the previous publication is still running at the deadline.
        """
        self.wait_until_ended()
        publication = Publication(version)
        self._running = publication
        stream = _side_stream(self._ranks.device)

        def send(weights: Weights) -> TransferStats | None:
            return None if sender is None else sender.send(manifest, weights, version)

        def work() -> None:
            with torch.cuda.stream(stream):
                publication.run(send, self.full_weights(manifest))

        threading.Thread(target=work, name=f"publish-{version}", daemon=True).start()
        return publication

    def wait_until_still(self) -> None:
        """Return once no publication reads the weights; RunFailed at the deadline."""
        if self._running is not None:
            self._running.wait_until_still(self._ranks.place.deadline_s)

    def wait_until_ended(self) -> None:
        """Return once the publishing group is free; RunFailed at the deadline."""
        if self._running is not None:
            self._running.wait_until_ended(self._ranks.place.deadline_s)

    def full_weights(self, manifest: WeightManifest) -> Weights:
        """(name, whole tensor in the manifest's dtype) in manifest order; one at a time, whole on rank 0 only.

        On other ranks the tensors are empty. A collective of the publishing group: every rank must exhaust it, and no
        publication may run meanwhile.
        """
        for entry in manifest.entries:
            yield entry.name, gather_to_first(self._weights[entry.name], entry.torch_dtype, self._ranks)


@torch.no_grad()
def gather_to_first(weight: Tensor, dtype: torch.dtype, ranks: Ranks) -> Tensor:
    """The whole weight on rank 0, cast before it travels; an empty tensor elsewhere. Publishing group.

    Shards lie along the first axis in equal steps, the last ones shorter or empty; gather wants equal sizes, so these
    are padded to the step.
    """
    if not isinstance(weight, DTensor):  # a buffer: the same on every rank
        return weight.to(dtype)
    local = weight.to_local().to(dtype)
    if ranks.world_size == 1:
        return local
    if weight.placements != (Shard(0),):
        raise TypeError(f"expected a weight sharded along its first axis, got {weight.placements}")
    rows = weight.shape[0]
    step = -(-rows // ranks.world_size)
    if len(local) < step:
        local = torch.cat([local, local.new_zeros(step - len(local), *local.shape[1:])])
    local = local.contiguous()
    if not ranks.is_first:
        dist.gather(local, dst=0, group=ranks.publishing)
        return local.new_zeros(0)
    whole = local.new_empty(ranks.world_size * step, *local.shape[1:])
    dist.gather(local, list(torch.split(whole, step)), dst=0, group=ranks.publishing)
    return whole[:rows]


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """On a GPU a stream beside the training's, behind everything that has been issued there; None on a CPU."""
    if device.type != "cuda":
        return None
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
