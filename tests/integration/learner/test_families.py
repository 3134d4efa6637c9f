"""Log-probs of the packed learner against each family's own forward pass, one sequence at a time."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from ullim.errors import BadInput
from ullim.learner import policy
from ullim.learner.ranks import RankPlace
from ullim.learner.support import HeadScaling

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "mistral-window": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=4)),
    "gemma3-window": (Gemma3ForCausalLM, Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=4)),
    "granite": (GraniteForCausalLM, GraniteConfig(**SMALL, logits_scaling=0.5, attention_multiplier=0.4)),
    "cohere": (CohereForCausalLM, CohereConfig(**SMALL, logit_scale=3.0)),
    "gemma2-capped-head": (
        Gemma2ForCausalLM,
        Gemma2Config(**SMALL, head_dim=8, attn_logit_softcapping=None, final_logit_softcapping=0.7, sliding_window=4),
    ),
}


@pytest.fixture
def saved(tmp_path, models):
    """Save a tiny model of a family where the scenarios look for it."""

    def save(model_class, config):
        torch.manual_seed(0)
        model = model_class(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return save


@torch.no_grad()
def own_logprobs(folder, batch, temperature):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for sequence in batch.sequences:
        row = torch.from_numpy(np.concatenate([sequence.prompt_ids, sequence.token_ids]).astype(np.int64))[None]
        by_token = torch.log_softmax(model(row).logits[0, :-1] / temperature, dim=-1)
        found.append(by_token.gather(-1, row[0, 1:, None])[len(sequence.prompt_ids) - 1 :, 0].numpy())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_model_itself(family, saved, worker):
    folder = saved(*FAMILIES[family])
    learner = worker.make_learner(folder.parent, RankPlace(), model="model", micro_batch_tokens=60)
    batch = worker.make_batch(groups=4, members=3)
    report = learner.step(batch)
    learner.close()
    expected = own_logprobs(folder, batch, temperature=0.8)
    assert max(len(s.prompt_ids) + len(s.token_ids) for s in batch.sequences) > 15, "the window must matter"
    for ours, theirs in zip(report.sequence_logprobs, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_masters(saved, worker):
    folder = saved(*FAMILIES["llama"])
    learner = worker.make_learner(folder.parent, RankPlace(), model="model", compute_dtype="bfloat16")
    batch = worker.make_batch(groups=4, members=3)
    before = worker.weights(learner)
    report = learner.step(batch)
    after = worker.weights(learner)
    learner.close()
    expected = own_logprobs(folder, batch, temperature=0.8)
    differences = np.concatenate([np.abs(a - b) for a, b in zip(report.sequence_logprobs, expected, strict=True)])
    assert 1e-4 < differences.mean() < 0.05, "half precision, and no worse"
    moved = np.concatenate([np.abs(after[name] - before[name]).ravel() for name in before])
    # a first AdamW step is the learning rate in size; a bfloat16 weight of size 1 could not move by 0.001 at all
    assert np.median(moved[moved > 0]) == pytest.approx(1e-3, rel=0.01)


def refuse(worker, folder, match):
    with pytest.raises(BadInput, match=match):
        worker.make_learner(folder.parent, RankPlace(), model=folder.name)


def test_capped_attention_scores_are_refused(saved, worker):
    config = dataclasses.replace(FAMILIES["gemma2-capped-head"][1], attn_logit_softcapping=20.0)
    refuse(worker, saved(Gemma2ForCausalLM, config), "Gemma2Attention uses softcap")


def test_a_head_that_the_config_does_not_tell_of_is_found(saved, worker, monkeypatch):
    folder = saved(*FAMILIES["granite"])
    monkeypatch.setattr(policy, "head_scaling", lambda config: HeadScaling())
    refuse(worker, folder, "other log-probs than the model's own forward pass")


def test_a_folder_without_a_model_is_named(worker, tmp_path):
    refuse(worker, tmp_path / "nothing", r"nothing has no config.json")
