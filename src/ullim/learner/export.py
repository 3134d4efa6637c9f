"""A Hugging Face folder of the current weights: what a person serves, and what the next run can start from."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ullim.learner.publish import Publisher
from ullim.weights.manifest import WeightManifest

FILE_BYTES = 2**30
"""Largest safetensors file unless one tensor is larger; what rank 0 holds beside its shards while writing."""

COPIED = {".json", ".jinja", ".model", ".txt"}
"""Kinds of file that come along: config, generation config, tokenizer, chat template."""


def export_folder(
    directory: Path, publisher: Publisher, manifest: WeightManifest, source: Path, *, write: bool, template: str | None
) -> None:
    """Write weights in the manifest's dtypes, with config and tokenizer of `source`. A collective; rank 0 has `write`.

    Tensors come one at a time; files are cut as the manifest's sizes say, so that their number is known from the first.
    """
    files = _cut(manifest)
    if write:
        directory.mkdir(parents=True, exist_ok=True)
        _copy_companions(source, directory, manifest, template)
    names = [
        "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        for number in range(1, len(files) + 1)
    ]
    weights = publisher.full_weights(manifest)
    for name, members in zip(names, files, strict=True):
        held: dict[str, Tensor] = {}
        for _ in range(members):
            key, tensor = next(weights)
            if write:
                held[key] = tensor.cpu().contiguous()
        if write:
            save_file(held, directory / name, metadata={"format": "pt"})
    if write and len(files) > 1:
        _write_index(directory, manifest, files, names)


def _cut(manifest: WeightManifest) -> list[int]:
    """How many of the manifest's entries go into each file."""
    counts: list[int] = []
    room = 0
    for entry in manifest.entries:
        if not counts or entry.nbytes > room:
            counts.append(0)
            room = FILE_BYTES
        counts[-1] += 1
        room -= entry.nbytes
    return counts


def _copy_companions(source: Path, directory: Path, manifest: WeightManifest, template: str | None) -> None:
    for file in sorted(source.iterdir()):
        if file.suffix in COPIED and not file.name.endswith(".index.json"):
            shutil.copyfile(file, directory / file.name)
    if template is not None:
        shutil.copyfile(template, directory / "chat_template.jinja")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # the older name of the same field would contradict it
    config["dtype"] = next(e.dtype for e in manifest.entries if getattr(torch, e.dtype).is_floating_point)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_index(directory: Path, manifest: WeightManifest, files: list[int], names: list[str]) -> None:
    entries = iter(manifest.entries)
    places = {next(entries).name: name for name, members in zip(names, files, strict=True) for _ in range(members)}
    index = {"metadata": {"total_size": manifest.nbytes}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
