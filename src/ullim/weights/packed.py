"""The packed stream: many tensors through a few fixed buffers, one being filled while another is on the wire.

Nothing here knows a network. `pack` is given a function that starts sending a chunk, `unpack` one that starts receiving
one; both return something to wait for.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ullim.errors import BadInput
from ullim.weights.checksum import checksum
from ullim.weights.cuts import CutPlan, plan_cuts
from ullim.weights.manifest import TensorEntry, WeightManifest
from ullim.weights.session import TransferFailed


class Pending(Protocol):
    """A chunk on its way; `wait` returns once its buffer may be used again, or raises."""

    def wait(self) -> None: ...


StartChunk = Callable[[torch.Tensor], Pending]
"""Begins to send, or to receive, one chunk: a contiguous uint8 tensor."""


@dataclass(slots=True)
class PackReport:
    """What `pack` did: seconds by kind of work, and the checksum of every tensor in manifest order if asked for."""

    gather_s: float = 0.0
    pack_s: float = 0.0
    send_s: float = 0.0
    checksums: list[int] = field(default_factory=list)


def make_buffers(plan: CutPlan, count: int) -> list[torch.Tensor]:
    """`count` buffers that hold any chunk of the plan, and no more than the plan has chunks. BadInput below one."""
    if count < 1:
        raise BadInput(f"weights: {count} buffers; a stream needs at least 1, and 2 to pack while it sends")
    return [torch.empty(plan.largest_chunk, dtype=torch.uint8) for _ in range(min(count, len(plan.chunk_bytes)))]


def fit_buffers(buffers: list[torch.Tensor], plan: CutPlan, count: int) -> None:
    """Keep `buffers`, in place, where they do for the plan; otherwise free them and make new ones."""
    if len(buffers) < min(count, len(plan.chunk_bytes)) or any(b.numel() < plan.largest_chunk for b in buffers):
        buffers.clear()
        buffers.extend(make_buffers(plan, count))


def pack(
    manifest: WeightManifest,
    tensors: Iterable[tuple[str, torch.Tensor]],
    send: StartChunk,
    buffers: Sequence[torch.Tensor],
    *,
    checked: bool,
) -> PackReport:
    """Send `tensors`, which come in manifest order, through `buffers` (from `make_buffers`) in turn.

    Returns once every chunk is sent. Beside the buffers it holds the one tensor it was last given: casting happens on
    the way into the buffer, and a non-contiguous tensor is read in place. Raises TransferFailed where the tensors are
    not those of the manifest.
    """
    plan, report = plan_cuts(manifest), PackReport()
    on_the_wire: list[Pending | None] = [None] * len(buffers)
    chunk = -1

    def finish(slot: int) -> None:
        pending, on_the_wire[slot] = on_the_wire[slot], None
        if pending is not None:
            started = time.perf_counter()
            pending.wait()
            report.send_s += time.perf_counter() - started

    def flush() -> None:
        if chunk >= 0:
            slot = chunk % len(buffers)
            started = time.perf_counter()
            on_the_wire[slot] = send(buffers[slot][: plan.chunk_bytes[chunk]])
            report.send_s += time.perf_counter() - started

    source = iter(tensors)
    for entry, cuts in zip(manifest.entries, plan.cuts, strict=True):
        tensor = _take(source, entry, report)
        total = 0
        for cut in cuts:
            if cut.chunk != chunk:
                flush()
                chunk = cut.chunk
                finish(chunk % len(buffers))
            started = time.perf_counter()
            nbytes = (cut.stop - cut.start) * entry.torch_dtype.itemsize
            place = buffers[chunk % len(buffers)][cut.offset : cut.offset + nbytes]
            copy_range(place.view(entry.torch_dtype), tensor, cut.start, cut.stop)
            if checked:
                total = checksum(place, total)
            report.pack_s += time.perf_counter() - started
        if checked:
            report.checksums.append(total)
        del tensor  # or two whole tensors would be alive while the next one is gathered
    _expect_end(source, report)
    flush()
    for step in range(1, len(buffers) + 1):  # oldest first
        finish((chunk + step) % len(buffers))
    return report


def unpack(
    manifest: WeightManifest, receive: StartChunk, buffers: Sequence[torch.Tensor], *, checked: bool
) -> Generator[tuple[str, torch.Tensor], None, list[int]]:
    """Yield (name, tensor) in manifest order; the generator returns the list of their checksums, if asked for.

    With two buffers the next chunk arrives while the caller uses this one. A tensor that lies in one chunk is a view
    into its buffer; one that was split is put together in memory of its own, freed with the last reference.
    """
    plan = plan_cuts(manifest)
    checksums: list[int] = []
    arriving: dict[int, Pending] = {}
    chunk = -1

    def start(number: int) -> None:
        if number < len(plan.chunk_bytes) and number not in arriving:
            arriving[number] = receive(buffers[number % len(buffers)][: plan.chunk_bytes[number]])

    for entry, cuts in zip(manifest.entries, plan.cuts, strict=True):
        dtype = entry.torch_dtype
        whole = torch.empty(entry.elements, dtype=dtype) if len(cuts) != 1 else None
        flat, total = whole, 0
        for cut in cuts:
            if cut.chunk != chunk:
                chunk = cut.chunk
                start(chunk)
                if len(buffers) > 1:
                    start(chunk + 1)  # its buffer is free: the caller has asked past everything in it
                arriving.pop(chunk).wait()
            nbytes = (cut.stop - cut.start) * dtype.itemsize
            place = buffers[chunk % len(buffers)][cut.offset : cut.offset + nbytes]
            if checked:
                total = checksum(place, total)
            if whole is None:
                flat = place.view(dtype)
            else:
                whole[cut.start : cut.stop] = place.view(dtype)
        if checked:
            checksums.append(total)
        assert flat is not None
        yield entry.name, flat.view(entry.shape)
    return checksums


def copy_range(destination: torch.Tensor, source: torch.Tensor, start: int, stop: int) -> None:
    """`destination` [stop - start] becomes elements [start, stop) of `source` in row-major order, cast on the way.

    A non-contiguous source is read row by row where it must be, never copied as a whole.
    """
    if source.is_contiguous():
        destination.copy_(source.view(-1)[start:stop])
    elif start == 0 and stop == source.numel():
        destination.view(source.shape).copy_(source)
    else:
        row = source.numel() // source.shape[0]
        while start < stop:
            index, inside = divmod(start, row)
            if inside == 0 and stop - start >= row:
                rows = (stop - start) // row
                part, taken = source[index : index + rows], rows * row
                destination[:taken].view(part.shape).copy_(part)
            else:
                taken = min(row - inside, stop - start)
                copy_range(destination[:taken], source[index], inside, inside + taken)
            destination, start = destination[taken:], start + taken


def _take(source: Iterator[tuple[str, torch.Tensor]], entry: TensorEntry, report: PackReport) -> torch.Tensor:
    """The caller's next tensor, which must be the one that `entry` describes."""
    given = _timed_next(source, report)
    if given is None:
        raise TransferFailed(f"weights: the tensors ended before {entry.name!r}, which the manifest lists next")
    name, tensor = given
    if name != entry.name:
        raise TransferFailed(f"weights: tensor {name!r} was given where the manifest lists {entry.name!r}")
    if tuple(tensor.shape) != entry.shape:
        raise TransferFailed(f"weights: {name!r} has shape {tuple(tensor.shape)}, the manifest says {entry.shape}")
    wire = entry.torch_dtype
    if tensor.dtype != wire and not (tensor.dtype.is_floating_point and wire.is_floating_point):
        raise TransferFailed(f"weights: {name!r} is {tensor.dtype}, the manifest says {wire}; only floats are cast")
    return tensor.detach()  # a copy out of a parameter would otherwise be recorded for its gradient


def _expect_end(source: Iterator[tuple[str, torch.Tensor]], report: PackReport) -> None:
    """Ask past the last tensor: that also lets a generator do what it does after it, such as a collective."""
    surplus = _timed_next(source, report)
    if surplus is not None:
        raise TransferFailed(f"weights: tensor {surplus[0]!r} comes after the last one that the manifest lists")


def _timed_next(source: Iterator[tuple[str, torch.Tensor]], report: PackReport) -> tuple[str, torch.Tensor] | None:
    started = time.perf_counter()
    given = next(source, None)
    report.gather_s += time.perf_counter() - started
    return given
