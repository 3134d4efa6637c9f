"""The manifest: what travels, under which names, and that two ends that differ notice."""

import dataclasses
import pickle

import pytest
import torch
from torch import nn
from torch.distributed import HashStore, ProcessGroup, destroy_process_group, init_process_group
from torch.distributed.fsdp import fully_shard

from ullim.errors import BadInput
from ullim.weights.manifest import TensorEntry, WeightManifest, build_manifest, manifest_of, named_weights


class Tied(nn.Module):
    """A head tied to the embedding, one buffer that checkpoints hold and one that they do not."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, device=device)
        self.body = nn.Linear(4, 4, device=device)
        self.head = nn.Linear(4, 6, bias=False, device=device)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64, device=device))
        self.register_buffer("scratch", torch.zeros(5, device=device), persistent=False)


TIED_ENTRIES = (
    TensorEntry("embed.weight", (6, 4), "bfloat16"),
    TensorEntry("body.weight", (4, 4), "bfloat16"),
    TensorEntry("body.bias", (4,), "bfloat16"),
    TensorEntry("steps", (3,), "int64"),
)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_is_listed_once_per_tensor_in_the_engine_dtype(device: str) -> None:
    manifest = manifest_of(Tied(device), torch.bfloat16, 1024)
    assert manifest.entries == TIED_ENTRIES
    assert manifest.tied == (("head.weight", "embed.weight"),)
    assert manifest.nbytes == 2 * (24 + 16 + 4) + 8 * 3
    assert manifest.names_of("embed.weight") == ("embed.weight", "head.weight")
    assert manifest.names_of("body.bias") == ("body.bias",)


def test_a_sharded_module_has_the_manifest_of_the_whole_one() -> None:
    assert ProcessGroup is not None
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        module = Tied()
        fully_shard(module.body)
        fully_shard(module)
        assert manifest_of(module, torch.bfloat16, 1024) == manifest_of(Tied(), torch.bfloat16, 1024)
    finally:
        destroy_process_group()


def test_no_engine_dtype_keeps_every_dtype() -> None:
    assert [e.dtype for e in manifest_of(Tied(), None, 1024).entries] == ["float32", "float32", "float32", "int64"]


def test_two_parameters_over_one_storage_are_tied_but_a_slice_and_empty_ones_are_not() -> None:
    module = nn.Module()
    whole = torch.ones(4, 4)
    module.a = nn.Parameter(whole)
    module.b = nn.Parameter(whole)
    module.part = nn.Parameter(whole[:2])
    module.flipped = nn.Parameter(whole.t())
    module.none = nn.Parameter(torch.empty(0))
    module.nothing = nn.Parameter(torch.empty(0))
    manifest = manifest_of(module, None, 1024)
    assert manifest.tied == (("b", "a"),)
    assert [e.name for e in manifest.entries] == ["a", "part", "flipped", "none", "nothing"]


def test_aliases_named_by_the_caller_are_left_out_of_the_entries() -> None:
    weights = named_weights(Tied())
    manifest = build_manifest(weights, dtype=torch.bfloat16, buffer_bytes=64, tied={"head.weight": "embed.weight"})
    assert manifest.entries == TIED_ENTRIES


def test_json_and_pickle_give_back_the_same_manifest() -> None:
    manifest = manifest_of(Tied(), torch.float16, 4096)
    for copy in (WeightManifest.from_json(manifest.to_json()), pickle.loads(pickle.dumps(manifest))):
        assert copy == manifest
        assert copy.digest == manifest.digest


def test_the_digest_sees_every_field() -> None:
    base = WeightManifest((TensorEntry("a", (2, 3), "float32"), TensorEntry("b", (1,), "int64")), (("c", "a"),), 128)
    others = [
        dataclasses.replace(base, buffer_bytes=192),
        dataclasses.replace(base, tied=()),
        dataclasses.replace(base, tied=(("c", "b"),)),
        dataclasses.replace(base, entries=base.entries[::-1]),
        dataclasses.replace(base, entries=(TensorEntry("a", (3, 2), "float32"), base.entries[1])),
        dataclasses.replace(base, entries=(TensorEntry("a", (2, 3), "int32"), base.entries[1])),
        dataclasses.replace(base, entries=(TensorEntry("x", (2, 3), "float32"), base.entries[1]), tied=()),
    ]
    digests = {base.digest, *(other.digest for other in others)}
    assert len(digests) == len(others) + 1


@pytest.mark.parametrize(
    ("entries", "tied", "buffer_bytes", "said"),
    [
        ((TensorEntry("a", (1,), "float32"),), (), 63, "buffer_bytes is 63"),
        ((TensorEntry("a", (1,), "float32"), TensorEntry("a", (2,), "float32")), (), 64, "twice: a"),
        ((TensorEntry("a", (1,), "float32"),), (("a", "a"),), 64, "twice: a"),
        ((TensorEntry("a", (1,), "float32"),), (("b", "z"),), 64, "'z', which no entry carries"),
        ((TensorEntry("a", (-1,), "float32"),), (), 64, "negative size"),
        ((TensorEntry("a", (1,), "float99"),), (), 64, "float99"),
        ((TensorEntry("a", (1,), "nn"),), (), 64, "'nn', which this torch lacks"),
    ],
)
def test_a_wrong_manifest_is_refused_by_name(
    entries: tuple[TensorEntry, ...], tied: tuple[tuple[str, str], ...], buffer_bytes: int, said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        WeightManifest(entries, tied, buffer_bytes)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"entries": [{"name": "a"}], "tied": [], "buffer_bytes": 64}'])
def test_text_that_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="not what to_json writes"):
        WeightManifest.from_json(text)
