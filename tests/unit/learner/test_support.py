"""Which models are refused, by what their config says."""

import pytest
from transformers import CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig, MistralConfig, Qwen3Config, T5Config

from ullim.errors import BadInput
from ullim.learner.support import HeadScaling, check_config, head_scaling, without_dropout


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(), HeadScaling(1.0, None)),
        (CohereConfig(logit_scale=0.0625), HeadScaling(0.0625, None)),
        (GraniteConfig(logits_scaling=8.0), HeadScaling(0.125, None)),
        (Gemma2Config(final_logit_softcapping=30.0), HeadScaling(1.0, 30.0)),
    ],
)
def test_head_scaling(config, expected):
    assert head_scaling(config) == expected


@pytest.mark.parametrize("config", [LlamaConfig(), MistralConfig(sliding_window=4), Qwen3Config(), Gemma2Config()])
def test_families_that_pass(config):
    check_config(config, "folder")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config(), "encoder-decoder"),
        (Qwen3Config(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"]), "linear_attention"),
        (LlamaConfig(attention_chunk_size=64), "chunked attention"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "rope_type dynamic",
        ),
    ],
)
def test_what_cannot_be_packed_is_named(config, message):
    with pytest.raises(BadInput, match=message):
        check_config(config, "folder")


def test_every_dropout_is_off():
    config = LlamaConfig(attention_dropout=0.1, resid_pdrop=0.2, hidden_dropout=0.3)
    without_dropout(config)
    assert (config.attention_dropout, config.resid_pdrop, config.hidden_dropout) == (0.0, 0.0, 0.0)
