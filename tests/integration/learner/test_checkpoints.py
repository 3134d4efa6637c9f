"""Save, load in a fresh process, go on; and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from ullim.errors import BadInput
from ullim.learner.ranks import RankPlace

# Processes that import torch and transformers; on a crowded machine that alone can take a minute.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def resumed(two_ranks, run_ranks):
    assert two_ranks  # the checkpoint is theirs
    return run_ranks(2, "resume")["resume"]


def test_two_steps_are_one_step_saved_loaded_and_one_more(two_ranks, resumed):
    straight, later = two_ranks["save_after_one"][0], resumed[0]
    assert later["version"] == 1
    for name in straight:
        np.testing.assert_array_equal(later[name], straight[name], err_msg=name)


def test_one_rank_goes_on_from_two(two_ranks, worker, models):
    straight = two_ranks["save_after_one"][0]
    later = worker.run("resume", models, RankPlace())
    for name in straight:
        np.testing.assert_allclose(later[name], straight[name], rtol=0, atol=1e-5, err_msg=name)


def test_the_model_folder_is_a_hugging_face_model(two_ranks, worker, models):
    folder = models / "checkpoint-2" / "model"
    assert two_ranks
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32  # as computed in this test
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    learner = worker.make_learner(models, RankPlace(), model="qwen")
    learner.load(models / "checkpoint-2")
    own = worker.weights(learner)
    learner.close()
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), own[f"weight/{name}"], err_msg=name)


def test_nothing_in_a_checkpoint_is_a_pickle(two_ranks, models):
    assert two_ranks
    files = [file for file in (models / "checkpoint-2").rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".json", ".safetensors"}
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, "np") as content:
                assert content.keys()
        else:
            json.loads(file.read_text())


def refused(worker, models, folder, match, model="qwen"):
    learner = worker.make_learner(models, RankPlace(), model=model)
    try:
        with pytest.raises(BadInput, match=match):
            learner.load(folder)
    finally:
        learner.close()


def test_incomplete_or_foreign_checkpoints_are_refused(two_ranks, worker, models, tmp_path):
    assert two_ranks
    whole = models / "checkpoint-2"
    refused(worker, models, whole, "of another model", model="llama")
    refused(worker, models, tmp_path, r"learner.json is missing")

    shard = sorted((whole / "state").glob("*.safetensors"))[-1].name
    lacking = shutil.copytree(whole, tmp_path / "lacking")
    (lacking / "state" / shard).unlink()
    refused(worker, models, lacking, "the checkpoint is incomplete")

    mixed = shutil.copytree(whole, tmp_path / "mixed")
    shutil.copy(mixed / "state" / shard, mixed / "state" / "older.safetensors")
    refused(worker, models, mixed, "files of another checkpoint: older.safetensors")
