"""A toy job that a real loop learns in seconds: a tiny model from scratch, and a taste for one letter."""

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}{{ m['content'] }}<turn>{% endfor %}"
LETTERS = string.ascii_lowercase[:12]


def fondness(samples: Sequence[Any]) -> list[float]:
    """Share of the answer that is the letter of its prompt; the reward function of the toy job."""
    return [sample.text.count(sample.messages[-1].content[0]) / max(1, len(sample.token_ids)) for sample in samples]


def unlucky(samples: Sequence[Any]) -> list[float]:
    """A reward that always fails."""
    raise ConnectionError("the scoring service is down")


def make_model(folder: Path) -> Path:
    """A two-layer Llama with random weights and one token per letter, saved to `folder`."""
    vocabulary = {token: place for place, token in enumerate(["<end>", "<turn>", *LETTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<turn>"))
    core.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", pad_token="<end>", additional_special_tokens=["<turn>"]
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_prompts(path: Path) -> Path:
    """One prompt for each of three letters, repeated so that an epoch is a few steps."""
    lines = [
        f'{{"id": "{letter}{number}", "messages": [{{"role": "user", "content": "{letter}"}}]}}\n'
        for number in range(8)
        for letter in LETTERS[:3]
    ]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def toy_recipe(root: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """The toy job as nested dicts; `sections` override single keys."""
    recipe: dict[str, dict[str, Any]] = {
        "policy": {"path": str(make_model(root / "model")), "compute_dtype": "float32"},
        "prompts": {"path": str(write_prompts(root / "prompts.jsonl")), "heldout": 0},
        "run": {"dir": str(root / "run"), "seed": 1},
        "sampling": {"max_new_tokens": 8},
        "engine": {"dtype": "float32", "max_running": 64},
        "nodes": {"threads": 1},
        "rewards": {"fondness": {"kind": "function", "function": "toy:fondness"}},
        "learner": {"learning_rate": 5e-3, "threads": 1},
        "loop": {"steps": 30, "groups_per_step": 6, "group_size": 8, "max_staleness": 2, "watchdog_s": 60.0},
        "weights": {"buffer_bytes": 65536, "deadline_s": 20.0},
        "monitor": {"tensorboard": False},
    }
    for name, values in sections.items():
        recipe[name] = {**recipe.get(name, {}), **values}
    return recipe
