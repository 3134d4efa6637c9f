"""Where each tensor's bytes travel: a manifest laid out over chunks of at most one buffer each.

Both ends work the layout out for themselves from the manifest, so it never crosses the wire.
"""

from dataclasses import dataclass

from ullim.weights.manifest import ALIGNMENT, WeightManifest


@dataclass(frozen=True, slots=True)
class Cut:
    """Elements [start, stop) of one tensor, flattened row by row, at byte `offset` of chunk number `chunk`."""

    chunk: int
    offset: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class CutPlan:
    """`chunk_bytes[c]` is how much of its buffer chunk c fills; `cuts[i]` are those of entry i, in order.

    A tensor without elements has no cut and may lie between any two chunks.
    """

    chunk_bytes: tuple[int, ...]
    cuts: tuple[tuple[Cut, ...], ...]

    @property
    def largest_chunk(self) -> int:
        """Bytes that a buffer really needs: less than `buffer_bytes` where the model is small."""
        return max(self.chunk_bytes, default=0)


def plan_cuts(manifest: WeightManifest) -> CutPlan:
    """Lay the tensors out in order, each starting at a multiple of `ALIGNMENT`.

    A tensor that fits a buffer is never split, so that its receiver gets a view and copies nothing; it starts a new
    chunk where the rest of the current one is too small. A larger one starts a new chunk and fills whole buffers, and
    the next tensor follows in what its last chunk leaves.
    """
    capacity = manifest.buffer_bytes // ALIGNMENT * ALIGNMENT  # so that a full buffer ends between two elements
    filled: list[int] = []
    all_cuts: list[tuple[Cut, ...]] = []
    for entry in manifest.entries:
        itemsize = entry.torch_dtype.itemsize
        cuts: list[Cut] = []
        start = 0
        while start < entry.elements:
            left = (entry.elements - start) * itemsize
            offset = -(-filled[-1] // ALIGNMENT) * ALIGNMENT if filled else capacity
            if offset + left > capacity and offset > 0:
                filled.append(0)
                offset = 0
            taken = min(left, capacity - offset)
            cuts.append(Cut(len(filled) - 1, offset, start, start + taken // itemsize))
            filled[-1] = offset + taken
            start += taken // itemsize
        all_cuts.append(tuple(cuts))
    return CutPlan(tuple(filled), tuple(all_cuts))
