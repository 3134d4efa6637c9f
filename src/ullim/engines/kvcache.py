"""Where keys and values live: numbered slots, all layers of one kind of token in one store.

The engine keeps two stores. The *prompt* store has one slot per request, shared by all its members; the
*answer* store has one slot per running member. Live slots are always the first ones, so that attention takes a
slice and never gathers; whoever removes a slot moves the last one into its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer caches per token. Keys and values may differ in size."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.heads * (self.key_dim + self.value_dim)


class SlotStore:
    """Keys [slots, heads, length, key_dim] and values [slots, heads, length, value_dim] per layer, growing in steps.

    `budget_bytes` only decides how generously to grow: within it capacity doubles, beyond it the store takes
    exactly what is asked for. Whether to ask at all is the scheduler's decision (`bytes_for`).
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        dtype: torch.dtype,
        device: torch.device,
        budget_bytes: int,
        length_step: int = 64,
    ) -> None:
        self._shapes = tuple(shapes)
        self._dtype = dtype
        self._device = device
        self._budget_bytes = budget_bytes
        self._length_step = length_step
        self.slots = 0
        self.length = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.release()

    def bytes_for(self, slots: int, length: int) -> int:
        """Bytes of a store that holds `slots` sequences of up to `length` tokens."""
        rounded = -(-length // self._length_step) * self._length_step
        return slots * rounded * sum(shape.width for shape in self._shapes) * self._dtype.itemsize

    def reserve(self, slots: int, length: int, live_slots: int) -> None:
        """Make room for `slots` × `length`, keeping what the first `live_slots` hold."""
        if slots <= self.slots and length <= self.length:
            return
        length = -(-max(length, 1) // self._length_step) * self._length_step
        roomy = (max(slots, min(2 * slots, 8 + slots), self.slots), max(length, self.length))
        if self.bytes_for(*roomy) <= self._budget_bytes:
            slots, length = roomy
        kept = min(length, self.length)
        for layer, shape in enumerate(self._shapes):
            for tensors, dim in ((self.keys, shape.key_dim), (self.values, shape.value_dim)):
                grown = torch.zeros(slots, shape.heads, length, dim, dtype=self._dtype, device=self._device)
                grown[:live_slots, :, :kept] = tensors[layer][:live_slots, :, :kept]
                tensors[layer] = grown
        self.slots, self.length = slots, length

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot over another."""
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[target, :, :length] = tensor[source, :, :length]

    def release(self) -> None:
        """Give all memory back; contents are lost."""
        self.slots = self.length = 0
        self.keys = [self._empty(s.heads, s.key_dim) for s in self._shapes]
        self.values = [self._empty(s.heads, s.value_dim) for s in self._shapes]

    def _empty(self, heads: int, dim: int) -> torch.Tensor:
        return torch.empty(0, heads, 0, dim, dtype=self._dtype, device=self._device)
