"""The optimiser against AdamW by hand, and the exported folder in several files."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ullim.learner import allocator, export
from ullim.learner.ranks import RankPlace


@pytest.fixture
def learner(worker, models):
    made = worker.make_learner(
        models, RankPlace(), learning_rate=0.01, warmup_steps=3, weight_decay=0.1, max_grad_norm=2.0, betas=(0.9, 0.95)
    )
    yield made
    made.close()


def test_warm_up_is_linear_and_ends(learner):
    rates = [learner._optimiser.learning_rate(version) for version in (0, 1, 2, 3, 50)]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])


def test_one_update_by_hand(learner):
    """Gradients of 1: clipped to norm 2, then the first AdamW step, −lr · sign, with decay on matrices only."""
    parameters = learner._policy.parameters
    before = {name: parameter.to_local().clone() for name, parameter in parameters.items()}
    elements = sum(parameter.numel() for parameter in parameters.values())
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    norm = learner._optimiser.gradient_norm()
    assert norm == pytest.approx(elements**0.5, rel=1e-6)
    learner._optimiser.update(0, norm)
    clipped = 2.0 / elements**0.5
    moments = learner._optimiser.moments()
    for name, parameter in parameters.items():
        decay = 0.0025 * 0.1 if parameter.ndim >= 2 else 0.0
        expected = before[name] * (1 - decay) - 0.0025 * clipped / (clipped + 1e-8)
        torch.testing.assert_close(parameter.to_local(), expected, rtol=0, atol=1e-6)
        first = moments[f"exp_avg/{name}"].to_local()
        torch.testing.assert_close(first, torch.full_like(first, 0.1 * clipped), rtol=1e-5, atol=0)
    assert learner._optimiser.updates == 1
    learner._optimiser.forget_gradients()
    assert all(parameter.grad is None for parameter in parameters.values())


def test_export_in_several_files(learner, worker, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "FILE_BYTES", 20_000)
    learner.export(tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert sorted(set(index["weight_map"].values())) == files
    own = worker.weights(learner)
    for name, parameter in AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), own[f"weight/{name}"], err_msg=name)


def test_glibc_takes_the_allocator_settings():
    assert allocator.keep_freed_memory() == (allocator.platform.libc_ver()[0] == "glibc")


def test_a_batch_for_another_version_is_refused(learner, worker):
    with pytest.raises(ValueError, match="for learner version 4, the learner is at 0"):
        learner.step(worker.make_batch(4))
