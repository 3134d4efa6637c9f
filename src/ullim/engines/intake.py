"""Taking a full set of weights: all of it or nothing.

The stream is copied into staging tensors first. Only when it has ended well, every tensor there once and of the right
shape, are the model's own tensors overwritten, so a sender that dies at any byte leaves the model as it was.
"""

from typing import Any

import torch

from ullim.errors import BadInput
from ullim.weights.manifest import WeightManifest
from ullim.weights.transport import Receiver

Staged = dict[str, torch.Tensor]


class WeightIntake:
    """Knows a model's tensors by name, and which names share one storage (tied weights)."""

    def __init__(self, model: Any) -> None:
        named: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self._tensors = {name: tensor.detach() for name, tensor in named.items()}

    def check(self, manifest: WeightManifest) -> None:
        """Raise BadInput unless the manifest gives every tensor of the model exactly one value of its shape."""
        sent = {entry.name: entry for entry in manifest.entries}
        covered = sent.keys() | {alias for alias, _ in manifest.tied}
        # A model that ties two names carries both; a sender that ties them by parameter identity may name only one.
        missing = [name for name in self._tensors if name not in covered and not self._twins(name) & sent.keys()]
        unknown = sorted(covered - self._tensors.keys())
        if missing or unknown:
            raise BadInput(
                f"weight manifest does not fit the engine's model: missing {missing[:5]}, unknown {unknown[:5]} "
                f"({len(missing)} and {len(unknown)} in all)"
            )
        for name, entry in sent.items():
            if tuple(entry.shape) != tuple(self._tensors[name].shape):
                raise BadInput(
                    f"weight manifest: {name!r} has shape {tuple(entry.shape)}, the engine's model has "
                    f"{tuple(self._tensors[name].shape)}"
                )
            twins = self._twins(name) & sent.keys()
            if twins:
                raise BadInput(
                    f"weight manifest sends {name!r} and {sorted(twins)[0]!r} apart, but the engine's model ties them; "
                    f"send one and list the other in `tied`"
                )

    def stage(self, manifest: WeightManifest, receiver: Receiver) -> Staged:
        """Copy the whole stream, cast to the model's dtypes. Whatever the receiver raises is raised here."""
        self.check(manifest)
        expected = [entry.name for entry in manifest.entries]
        staged: Staged = {}
        for name, tensor in receiver.receive(manifest):
            if len(staged) == len(expected) or name != expected[len(staged)]:
                wanted = expected[len(staged)] if len(staged) < len(expected) else "the end of the stream"
                raise BadInput(f"weight stream: got {name!r} where {wanted!r} was due")
            if tensor.shape != self._tensors[name].shape:
                raise BadInput(
                    f"weight stream: {name!r} has shape {tuple(tensor.shape)}, "
                    f"due is {tuple(self._tensors[name].shape)}"
                )
            staged[name] = torch.empty_like(self._tensors[name]).copy_(tensor)
        if len(staged) != len(expected):
            raise BadInput(f"weight stream ended after {len(staged)} of {len(expected)} tensors")
        return staged

    def apply(self, manifest: WeightManifest, staged: Staged) -> None:
        """Overwrite the model's tensors in place; whoever shares their storage follows."""
        for name, tensor in staged.items():
            self._tensors[name].copy_(tensor)
        for alias, carrier in manifest.tied:
            if not _same_storage(self._tensors[alias], self._tensors[carrier]):
                # Tied at the sender, apart here: the values must still agree.
                self._tensors[alias].copy_(staged[carrier])

    def _twins(self, name: str) -> set[str]:
        """Other names of the same storage."""
        return {n for n, t in self._tensors.items() if n != name and _same_storage(t, self._tensors[name])}


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numel() > 0 and one.data_ptr() == other.data_ptr() and one.shape == other.shape
