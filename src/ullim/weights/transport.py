"""The two ends of a weight transfer, whatever carries it.

    learner rank 0                                        inference nodes
    Sender.send(manifest, tensors, version)   ======>     for name, tensor in Receiver.receive(manifest): ...

`gloo_sender.py` and `gloo_receiver.py` carry it over CPU networks. Anything with these two methods can stand in:
another network, a folder, a fake in a test.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from ullim.weights.manifest import WeightManifest
from ullim.weights.session import TransferStats


class Sender(Protocol):
    """The learner's end."""

    def send(
        self, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> TransferStats:
        """Send every entry's tensor to every receiver; return once all of them have confirmed.

        `tensors` yields (name, whole tensor) in manifest order, aliases left out. The next one is asked for only when
        the last has been packed, so a caller may gather shards lazily and hold one tensor at a time. Raises
        TransferFailed naming the receivers at fault, or whatever `tensors` raised.
        """
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The engine's end: yields (name, tensor) in manifest order, each exactly once, aliases left out.

    The yielded tensor is a view into a receive buffer and valid only until the next one is asked for.
    The iteration ends normally only if everything arrived and was proven right; until then nothing may be committed.
    Raises TransferFailed otherwise.
    """

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, torch.Tensor]]: ...
