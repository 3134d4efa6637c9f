"""Tiny random models of several architectures, and a subject over each, for the embedded engine's tests."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ullim.engines.transformers import TransformersEngine
from ullim.records import FloatArray, IntArray
from ullim.weights.manifest import WeightManifest, manifest_of

VOCABULARY = 97
CONTEXT = 256


def llama() -> Any:
    """Grouped-query attention, tied embeddings."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )
    )


def gpt_neox() -> Any:
    """Parallel residual, rotary on part of the head, biases, untied embeddings."""
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT,
            eos_token_id=None,
            bos_token_id=None,
        )
    )


def qwen3() -> Any:
    """Norms on queries and keys, a head size of its own."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )
    )


def gpt2() -> Any:
    """Learned absolute positions, transposed projection weights."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=CONTEXT,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )
    )


class LetterTokenizer:
    """Token i is one character, so that any run of tokens is a stop string."""

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        return "".join(chr(0x4E00 + int(token)) for token in token_ids)


class StateDictReceiver:
    """Yields a state dict through one reused buffer, as a transfer does, and may break off."""

    def __init__(self, state: dict[str, torch.Tensor], fail_after: int | None = None) -> None:
        self._state = state
        self._fail_after = fail_after

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, torch.Tensor]]:
        for count, entry in enumerate(manifest.entries):
            if count == self._fail_after:
                raise ConnectionError("peer is gone")
            buffer = self._state[entry.name].clone()
            yield entry.name, buffer
            buffer.fill_(float("nan"))  # a view kept beyond its time must show
        if self._fail_after == len(manifest.entries):
            raise ConnectionError("peer is gone at the very end")


def randomised(model: Any, seed: int) -> Any:
    """`model` with weights wide enough that positions, heads and neighbours all matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name and "weight" in name else 0.3 * noise)
    return model.float().eval()


def transfer_of(model: Any) -> tuple[WeightManifest, dict[str, torch.Tensor]]:
    """The manifest of `model`, tied tensors once, and the state dict behind it."""
    return manifest_of(model, None, 1 << 20), {k: v.detach().clone() for k, v in model.state_dict().items()}


class TinySubject:
    """A `conformance.engine.Subject` over the embedded engine and a tiny model."""

    vocabulary = VOCABULARY
    max_context = CONTEXT
    tolerance = 1e-4

    def __init__(self, make_model: Any, *, dtype: str = "float32", **options: Any) -> None:
        """The reference stays in float32, over weights that `dtype` can hold exactly."""
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._models = {
            which: randomised(make_model(), seed).to(self._dtype).float() for which, seed in (("old", 1), ("new", 2))
        }
        self._options = {"max_running": 8, "seed": 5, **options}

    def start(self) -> TransformersEngine:
        model = copy.deepcopy(self._models["old"]).to(self._dtype)
        return TransformersEngine.from_model(model, LetterTokenizer(), **self._options)

    def weights(self, which: str, fail_after: int | None = None) -> tuple[WeightManifest, StateDictReceiver]:
        manifest, state = transfer_of(self._models[which])
        return manifest, StateDictReceiver(state, fail_after)

    def reference(self, which: str, prompt: IntArray, completion: IntArray, temperature: float) -> FloatArray:
        if not len(completion):
            return np.zeros(0, dtype=np.float32)
        ids = torch.tensor([*prompt.tolist(), *completion.tolist()])
        logits = self._logits(which, ids)[len(prompt) - 1 : -1] / (temperature or 1.0)
        logprobs = torch.log_softmax(logits, -1).gather(1, ids[len(prompt) :, None])[:, 0]
        return logprobs.numpy().astype(np.float32)

    def next_distribution(self, which: str, prompt: IntArray) -> FloatArray:
        return torch.softmax(self._logits(which, torch.tensor(prompt.tolist()))[-1], -1).numpy().astype(np.float32)

    def text(self, token_ids: IntArray) -> str:
        return LetterTokenizer().decode(token_ids.tolist())

    def _logits(self, which: str, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self._models[which](input_ids=ids[None], use_cache=False).logits[0].double()
        return logits
