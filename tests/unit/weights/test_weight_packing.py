"""Cuts and the packed stream, over a wire in memory that reads as late and writes as early as a real one may."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ullim.errors import BadInput
from ullim.weights.cuts import plan_cuts
from ullim.weights.manifest import ALIGNMENT, TensorEntry, WeightManifest, build_manifest
from ullim.weights.packed import copy_range, fit_buffers, make_buffers, pack, unpack
from ullim.weights.session import TransferFailed

DTYPES = ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int64", "int8", "uint8", "bool", "complex64"]

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
entry_lists = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=12)


def manifest_from(parts: list[tuple[tuple[int, ...], str]], buffer_bytes: int) -> WeightManifest:
    entries = tuple(TensorEntry(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(parts))
    return WeightManifest(entries, (), buffer_bytes)


class Wire:
    """Broadcast in memory. What is sent is read only when waited for, what is received is written at once."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.in_flight = self.most_in_flight = 0
        self._taken = 0

    def send(self, chunk: torch.Tensor) -> "OnTheWire":
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return OnTheWire(self, chunk)

    def receive(self, chunk: torch.Tensor) -> "Arrived":
        data = self.chunks[self._taken]
        self._taken += 1
        assert chunk.numel() == len(data)
        chunk.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return Arrived()


@dataclass
class OnTheWire:
    wire: Wire
    chunk: torch.Tensor

    def wait(self) -> None:
        self.wire.in_flight -= 1
        self.wire.chunks.append(self.chunk.numpy().tobytes())


class Arrived:
    def wait(self) -> None:
        pass


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all (NaN payloads too), but for bools, which have only two legal values."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    elements = torch.Size(shape).numel()
    data = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape) if elements else torch.empty(shape, dtype=dtype)


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    """The same values laid out with their axes in the opposite order, and a gap after each."""
    if tensor.dim() == 0:
        return tensor
    backwards = tensor.permute(*reversed(range(tensor.dim()))).contiguous()
    roomy = torch.stack([backwards, backwards], dim=-1)[..., 0]
    return roomy.permute(*reversed(range(tensor.dim())))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    assert left.shape == right.shape
    assert left.dtype == right.dtype
    return left.contiguous().view(-1).view(torch.uint8).equal(right.contiguous().view(-1).view(torch.uint8))


@settings(deadline=None, max_examples=50)
@given(parts=entry_lists, buffer_bytes=st.integers(ALIGNMENT, 700))
def test_cuts_cover_every_element_once_inside_their_chunks_and_never_overlap(
    parts: list[tuple[tuple[int, ...], str]], buffer_bytes: int
) -> None:
    manifest = manifest_from(parts, buffer_bytes)
    plan = plan_cuts(manifest)
    used: list[list[tuple[int, int]]] = [[] for _ in plan.chunk_bytes]
    for entry, cuts in zip(manifest.entries, plan.cuts, strict=True):
        covered = 0
        for cut in cuts:
            assert cut.start == covered < cut.stop
            covered = cut.stop
            size = entry.torch_dtype.itemsize
            used[cut.chunk].append((cut.offset, cut.offset + (cut.stop - cut.start) * size))
            assert cut.offset % ALIGNMENT == 0
        assert covered == entry.elements
        if entry.nbytes <= buffer_bytes // ALIGNMENT * ALIGNMENT:
            assert len(cuts) <= 1, "a tensor that fits a buffer is not split"
    for filled, ranges in zip(plan.chunk_bytes, used, strict=True):
        assert ranges, "no chunk is empty"
        assert all(before[1] <= after[0] < before[1] + ALIGNMENT for before, after in pairwise(ranges))
        assert ranges[0][0] == 0
        assert ranges[-1][1] == filled <= buffer_bytes
    assert plan.largest_chunk == max(plan.chunk_bytes, default=0)


def test_cuts_worked_out_by_hand() -> None:
    """Buffers of 128 bytes: 40 bytes, 60 bytes (at 64), 300 bytes over three chunks, 8 behind its last piece."""
    plan = plan_cuts(manifest_from([((10,), "float32"), ((15,), "float32"), ((75,), "float32"), ((1,), "int64")], 130))
    assert plan.chunk_bytes == (124, 128, 128, 72)
    assert [[(c.chunk, c.offset, c.start, c.stop) for c in cuts] for cuts in plan.cuts] == [
        [(0, 0, 0, 10)],
        [(0, 64, 0, 15)],
        [(1, 0, 0, 32), (2, 0, 32, 64), (3, 0, 64, 75)],
        [(3, 64, 0, 1)],
    ]


@settings(deadline=None, max_examples=50)
@given(
    parts=entry_lists,
    buffer_bytes=st.integers(ALIGNMENT, 900),
    sender_buffers=st.integers(1, 3),
    receiver_buffers=st.integers(1, 3),
    engine_dtype=st.sampled_from([None, torch.bfloat16, torch.float16]),
    scatter=st.booleans(),
    checksum=st.booleans(),
)
@example([((7, 7, 7), "float32"), ((), "bool"), ((0, 3), "int8")], 64, 2, 2, torch.bfloat16, True, True)
@example([], 64, 2, 2, None, False, True)
@example([((0,), "float32")], 64, 2, 2, None, False, True)
def test_whatever_goes_in_comes_out_cast_and_bit_for_bit(
    parts: list[tuple[tuple[int, ...], str]],
    buffer_bytes: int,
    sender_buffers: int,
    receiver_buffers: int,
    engine_dtype: torch.dtype | None,
    scatter: bool,
    checksum: bool,
) -> None:
    tensors = {f"t{i}": random_tensor(shape, getattr(torch, dtype), seed=i) for i, (shape, dtype) in enumerate(parts)}
    manifest = build_manifest(tensors, dtype=engine_dtype, buffer_bytes=buffer_bytes)
    plan, wire = plan_cuts(manifest), Wire()
    given_tensors = ((name, scattered(t) if scatter else t) for name, t in tensors.items())

    report = pack(manifest, given_tensors, wire.send, make_buffers(plan, sender_buffers), checked=checksum)

    assert [len(chunk) for chunk in wire.chunks] == list(plan.chunk_bytes)
    assert wire.in_flight == 0
    assert wire.most_in_flight <= sender_buffers
    stream = unpack(manifest, wire.receive, make_buffers(plan, receiver_buffers), checked=checksum)
    for name, tensor in tensors.items():
        arrived_name, arrived = next(stream)
        assert arrived_name == name
        if engine_dtype and tensor.dtype.is_floating_point and tensor.dtype != engine_dtype:
            expected = tensor.to(engine_dtype)
            assert arrived.isnan().equal(expected.isnan())  # a cast keeps NaN, not which NaN
            assert same_bits(arrived.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
        else:
            assert same_bits(arrived, tensor)
    with pytest.raises(StopIteration) as end:
        next(stream)
    assert end.value.value == report.checksums
    assert len(report.checksums) == (len(tensors) if checksum else 0)


def test_one_buffer_is_on_the_wire_while_the_other_fills() -> None:
    tensors = {f"t{i}": torch.full((32,), float(i)) for i in range(6)}
    manifest, wire = build_manifest(tensors, dtype=None, buffer_bytes=128), Wire()
    waiting_when_pulled = []

    def pulled() -> Iterator[tuple[str, torch.Tensor]]:
        for item in tensors.items():
            waiting_when_pulled.append(wire.in_flight)
            yield item

    pack(manifest, pulled(), wire.send, make_buffers(plan_cuts(manifest), 2), checked=False)
    assert waiting_when_pulled == [0, 0, 1, 1, 1, 1]  # 0 flushed when 1 needs its place, and so on
    assert wire.most_in_flight == 2  # only at the end, where nothing is left to pack


@pytest.mark.parametrize("layout", ["contiguous", "scattered"])
def test_the_sender_holds_one_tensor_at_a_time(layout: str) -> None:
    """Split, cast and non-contiguous tensors included: the memory of each is free before the next is gathered."""
    shape = (50, 40)
    manifest = build_manifest(
        [(f"t{i}", torch.empty(shape)) for i in range(4)], dtype=torch.bfloat16, buffer_bytes=1024
    )
    memory: list[weakref.ref[np.ndarray[Any, Any]]] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(4):
            assert [ref for ref in memory if ref() is not None] == []
            # A tensor over an array keeps that alive exactly as long as anything uses the tensor's memory.
            array = np.ones(shape if layout == "contiguous" else shape[::-1], dtype=np.float32)
            memory.append(weakref.ref(array))
            tensor = torch.from_numpy(array)
            del array
            yield f"t{i}", tensor if layout == "contiguous" else tensor.t()
            del tensor

    wire = Wire()
    pack(manifest, gathered(), wire.send, make_buffers(plan_cuts(manifest), 2), checked=True)
    assert len(memory) == 4


@settings(deadline=None, max_examples=50)
@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=4), data=st.data())
def test_any_range_of_a_scattered_tensor_is_read_in_row_major_order(shape: list[int], data: st.DataObject) -> None:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    out = torch.empty(stop - start)
    copy_range(out, scattered(tensor), start, stop)
    assert out.tolist() == list(range(start, stop))


@pytest.mark.parametrize(
    ("given_tensors", "said"),
    [
        ([("a", torch.zeros(2))], "ended before 'b'"),
        ([("b", torch.zeros(3)), ("a", torch.zeros(2))], "'b' was given where the manifest lists 'a'"),
        ([("a", torch.zeros(3)), ("b", torch.zeros(3))], r"'a' has shape \(3,\), the manifest says \(2,\)"),
        ([("a", torch.zeros(2, dtype=torch.int32)), ("b", torch.zeros(3))], "'a' is torch.int32.*only floats are cast"),
        ([("a", torch.zeros(2)), ("b", torch.zeros(3)), ("c", torch.zeros(1))], "'c' comes after the last"),
    ],
)
def test_tensors_that_are_not_those_of_the_manifest_are_refused(
    given_tensors: list[tuple[str, torch.Tensor]], said: str
) -> None:
    manifest = build_manifest([("a", torch.zeros(2)), ("b", torch.zeros(3))], dtype=torch.bfloat16, buffer_bytes=64)
    with pytest.raises(TransferFailed, match=said):
        pack(manifest, given_tensors, Wire().send, make_buffers(plan_cuts(manifest), 2), checked=False)


def test_buffers_are_kept_while_they_fit_and_never_larger_or_more_than_needed() -> None:
    large, small = (plan_cuts(manifest_from([((n,), "uint8")] * 3, 1024)) for n in (1000, 10))
    buffers: list[torch.Tensor] = []
    fit_buffers(buffers, small, 2)
    assert [b.numel() for b in buffers] == [138]  # three tensors of 10 bytes, 64 apart, are one chunk
    fit_buffers(buffers, large, 2)
    assert [b.numel() for b in buffers] == [1000, 1000]
    before = [b.data_ptr() for b in buffers]
    fit_buffers(buffers, small, 2)
    assert [b.data_ptr() for b in buffers] == before
    with pytest.raises(BadInput, match="at least 1"):
        make_buffers(small, 0)
