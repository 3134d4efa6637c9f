"""What one set of weights consists of: the one source of truth that both ends of a transfer read.

The learner builds a manifest once from its module and hands it to every engine. Where the bytes of each tensor
travel is worked out from it by `cuts.plan_cuts`, so the two ends cannot disagree about anything that the digest
does not cover.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Protocol

import torch

from ullim.errors import BadInput

ALIGNMENT = 64
"""Bytes. Every tensor starts at a multiple of it, so that a view by any dtype is legal; also a cache line."""

FORMAT = 1
"""Part of the digest: raise it when the wire changes, and two builds that differ refuse each other by name."""


class TensorLike(Protocol):
    """All that a manifest needs to know of a tensor; a DTensor says its global shape."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor on the wire. `dtype` is torch's name without the prefix, e.g. "bfloat16"."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself; BadInput where this torch has none of that name."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise BadInput(f"weight manifest: tensor {self.name!r} has dtype {self.dtype!r}, which this torch lacks")
        return found

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Order, shapes and dtypes of every tensor sent, aliases of tied ones, and the size of a buffer.

    A tied tensor travels once, under the name of its entry. `tied` says which other names share it: a receiver whose
    own module ties them needs to do nothing, any other writes the value under each name (`names_of`).
    Raises BadInput on a name that appears twice, an alias of nothing, or a buffer below `ALIGNMENT` bytes.
    """

    entries: tuple[TensorEntry, ...]
    tied: tuple[tuple[str, str], ...]  # (alias, name of the entry that carries its values)
    buffer_bytes: int

    def __post_init__(self) -> None:
        if self.buffer_bytes < ALIGNMENT:
            raise BadInput(f"weight manifest: buffer_bytes is {self.buffer_bytes}, the least is {ALIGNMENT}")
        carried = {entry.name for entry in self.entries}
        names = [entry.name for entry in self.entries] + [alias for alias, _ in self.tied]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise BadInput(f"weight manifest: names appear twice: {', '.join(twice)}")
        for alias, target in self.tied:
            if target not in carried:
                raise BadInput(f"weight manifest: {alias!r} is tied to {target!r}, which no entry carries")
        for entry in self.entries:
            if any(size < 0 for size in entry.shape):
                raise BadInput(f"weight manifest: tensor {entry.name!r} has a negative size in shape {entry.shape}")
            _ = entry.torch_dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without the padding between them."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of everything that decides the bytes on the wire; both ends compare it before the first one."""
        canonical = json.dumps([FORMAT, ALIGNMENT, asdict(self)], separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def names_of(self, name: str) -> tuple[str, ...]:
        """The entry's own name, then its aliases."""
        return (name, *(alias for alias, target in self.tied if target == name))

    def to_json(self) -> str:
        """One line of JSON, read back by `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "WeightManifest":
        """The manifest that `to_json` wrote; BadInput on anything else."""
        try:
            raw = json.loads(text)
            entries = tuple(TensorEntry(e["name"], tuple(e["shape"]), e["dtype"]) for e in raw["entries"])
            tied = tuple((alias, target) for alias, target in raw["tied"])
            return cls(entries, tied, int(raw["buffer_bytes"]))
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"weight manifest: not what to_json writes ({error!r}): {text[:120]!r}") from error


def build_manifest(
    tensors: Mapping[str, TensorLike] | Iterable[tuple[str, TensorLike]],
    *,
    dtype: torch.dtype | None,
    buffer_bytes: int,
    tied: Mapping[str, str] | None = None,
) -> WeightManifest:
    """The manifest of named tensors in the order given.

    `dtype` is what the engine computes in: floating tensors travel in it, all others as they are; None keeps every
    dtype. `tied` maps an alias to the name that carries its values; aliases may also stand in `tensors`.
    """
    aliases = dict(tied or {})
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    entries = tuple(
        TensorEntry(name, tuple(tensor.shape), _dtype_name(_wire_dtype(tensor.dtype, dtype)))
        for name, tensor in pairs
        if name not in aliases
    )
    return WeightManifest(entries, tuple(aliases.items()), buffer_bytes)


def manifest_of(module: torch.nn.Module, dtype: torch.dtype | None, buffer_bytes: int) -> WeightManifest:
    """The manifest of a module: its parameters, then the buffers that its checkpoint holds, tied ones found.

    Two names are tied where they hold one tensor object or see one storage in the same way. Works on meta tensors
    and on modules sharded by FSDP2 (shapes are global ones; no collective runs).
    """
    tensors = named_weights(module)
    first_name: dict[object, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        known = first_name.setdefault(_identity(tensor), name)
        if known != name:
            tied[name] = known
    return build_manifest(tensors, dtype=dtype, buffer_bytes=buffer_bytes, tied=tied)


def named_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every weight of a module under every name it has: parameters, then buffers that its checkpoint holds."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    kept = module.state_dict(keep_vars=True).keys()  # only this tells which buffers are saved
    tensors.update((n, b) for n, b in module.named_buffers(remove_duplicate=False) if n in kept)
    return tensors


def _identity(tensor: torch.Tensor) -> object:
    # Shards and meta tensors have no address of their own to compare; empty ones all share the address 0.
    # A DTensor is known by its mesh: importing its class takes seconds, and no engine needs it.
    if hasattr(tensor, "device_mesh") or tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _wire_dtype(own: torch.dtype, engine: torch.dtype | None) -> torch.dtype:
    return engine if engine is not None and own.is_floating_point else own


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
