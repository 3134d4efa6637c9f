"""Everything a learner needs to go on: sharded master weights and optimiser moments, as safetensors and JSON.

torch's distributed checkpoint decides who writes which shard and moves shards between different numbers of ranks; its
safetensors storage replaces the usual one, whose metadata is a pickle (docs/decisions/checkpoint-format.md).
"""

import json
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from ullim.errors import BadInput
from ullim.learner.optimiser import Optimiser
from ullim.learner.policy import ShardedPolicy
from ullim.learner.ranks import Ranks

FORMAT = 1
META = "learner.json"


def save_state(directory: Path, policy: ShardedPolicy, optimiser: Optimiser, ranks: Ranks, *, version: int) -> None:
    """Write the state of all ranks; a collective. The JSON file comes last: a folder without it is incomplete."""
    if ranks.is_first:
        directory.mkdir(parents=True, exist_ok=True)
    ranks.barrier()
    save(
        _tensors(policy, optimiser),
        storage_writer=HuggingFaceStorageWriter(str(directory), save_distributed=True),
        process_group=ranks.work,
    )
    ranks.barrier()
    if ranks.is_first:
        meta = {
            "format": FORMAT,
            "version": version,
            "optimiser_updates": optimiser.updates,
            "parameters": {name: list(p.shape) for name, p in policy.parameters.items()},
            "files": {file.name: file.stat().st_size for file in sorted(directory.glob("*.safetensors"))},
        }
        (directory / META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    ranks.barrier()


def load_state(directory: Path, policy: ShardedPolicy, optimiser: Optimiser, ranks: Ranks) -> int:
    """Fill the policy and the optimiser in place; returns the version. A collective.

    Raises:
        BadInput: no checkpoint, one that lacks files, or one whose parameters are not those of the policy.
    """
    meta = _read_meta(directory, policy)
    tensors = _tensors(policy, optimiser)
    load(tensors, storage_reader=HuggingFaceStorageReader(str(directory)), process_group=ranks.work)
    optimiser.updates = int(meta["optimiser_updates"])
    return int(meta["version"])


def _tensors(policy: ShardedPolicy, optimiser: Optimiser) -> dict[str, DTensor]:
    return {f"weight/{name}": parameter for name, parameter in policy.parameters.items()} | optimiser.moments()


def _read_meta(directory: Path, policy: ShardedPolicy) -> dict[str, Any]:
    try:
        meta = json.loads((directory / META).read_text(encoding="utf-8"))
        files, shapes, found = meta["files"], meta["parameters"], meta["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{directory / META} is missing or damaged ({error!r}); give a checkpoint that was finished"
        ) from error
    if found != FORMAT:
        raise BadInput(f"{directory}: checkpoint format {found}, this version reads {FORMAT}")
    for name, size in files.items():
        file = directory / name
        if not file.is_file() or file.stat().st_size != size:
            raise BadInput(
                f"{file} is missing or has not the {size} bytes that {META} says; the checkpoint is incomplete"
            )
    if foreign := sorted(p.name for p in directory.glob("*.safetensors") if p.name not in files):
        raise BadInput(f"{directory} has files of another checkpoint: {', '.join(foreign)}; remove the folder")
    own = {name: list(parameter.shape) for name, parameter in policy.parameters.items()}
    if different := sorted(name for name in own.keys() | shapes.keys() if own.get(name) != shapes.get(name)):
        name = different[0]
        raise BadInput(
            f"{directory} is of another model: {len(different)} parameters differ, first {name!r}: checkpoint "
            f"{shapes.get(name)}, policy {own.get(name)}"
        )
    return dict(meta)
