"""Tiny models, and learner ranks as processes."""

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

WORKER = Path(__file__).with_name("rank_worker.py")
COMMON = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def save_model(model_class: Any, config: Any, folder: Path) -> Path:
    """A model with weights large enough that its predictions are not flat."""
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_is_left_behind() -> Iterator[None]:
    """A learner that ran in this process has joined torch's default group, which other tests want to find unused."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `llama` (own head; a vocabulary that no two ranks can share evenly) and `qwen` (tied)."""
    folder = tmp_path_factory.mktemp("learner")
    save_model(LlamaForCausalLM, LlamaConfig(**COMMON), folder / "llama")
    save_model(Qwen3ForCausalLM, Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=True), folder / "qwen")
    return folder


@pytest.fixture(scope="session")
def worker() -> ModuleType:
    """The scenarios of `rank_worker.py`, to be run as one rank in this process."""
    spec = importlib.util.spec_from_file_location("rank_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="session")
def run_ranks(models: Path) -> Callable[..., Results]:
    """Run scenarios on so many ranks in processes of their own: name -> arrays of each rank."""

    def run(world: int, *names: str) -> Results:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER), str(models), str(rank), str(world), str(port), *names],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        errors = []
        for process in processes:
            try:
                errors.append(process.communicate(timeout=540)[1])
            finally:
                process.kill()
        if any(process.returncode for process in processes):
            pytest.fail("\n".join(f"rank {rank}:\n{error[-3000:]}" for rank, error in enumerate(errors)))
        return {
            name: [dict(np.load(models / f"{name}-{rank}-of-{world}.npz")) for rank in range(world)] for name in names
        }

    return run


@pytest.fixture(scope="session")
def two_ranks(run_ranks: Callable[..., Results], worker: ModuleType) -> Results:
    """Every scenario but `resume`, on two ranks of one meeting."""
    return run_ranks(2, *worker.STEPS, "lone_sequence", "bad_steps", "overlap", "save_after_one")
