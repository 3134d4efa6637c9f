"""Which models the learner can train exactly, decided when they are loaded.

The learner computes attention and output head itself, so a model with a feature that these leave out would be trained
as another model than the one that samples. Known obstacles are refused by name from the config; whatever the config
does not tell is found by `probe`, which compares packed log-probs with those of the model's own forward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullim.errors import BadInput
from ullim.learner.packing import PackedBatch, pack
from ullim.learner.partition import Piece
from ullim.records import Sequence

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
PROBE_TOLERANCE = 2e-3
"""Nats, in float32. Rounding stays below 1e-4; a head or mask that differs in meaning shows as 1e-2 and far more."""


@dataclass(frozen=True, slots=True)
class HeadScaling:
    """What lies between hidden · Wᵀ and the logits: z = scale · product, then softcap · tanh(z / softcap)."""

    scale: float = 1.0
    softcap: float | None = None


def head_scaling(config: Any) -> HeadScaling:
    """The head's scaling from a Hugging Face config: Gemma 2 caps, Cohere multiplies, Granite divides."""
    text = config.get_text_config()
    scale = float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)
    return HeadScaling(scale, getattr(text, "final_logit_softcapping", None))


def without_dropout(config: Any) -> None:
    """Set every dropout rate of a Hugging Face config to 0, in place.

    With dropout the ratio to the engine's log-probs would be noise: the engine samples without it.
    """
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, setting in list(vars(part).items()):
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(setting, float):
                setattr(part, name, 0.0)


def check_config(config: Any, path: str) -> None:
    """BadInput naming what in the model's config cannot be trained here."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise BadInput(f"policy.path: {path} is an encoder-decoder; a causal LM is needed")
    foreign = sorted(set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYERS)
    if getattr(text, "attention_chunk_size", None):
        foreign.append("chunked attention")
    if foreign:
        raise BadInput(
            f"policy.path: {path} has layers of kind {', '.join(foreign)}; packed sequences are exact for "
            f"{' and '.join(sorted(KNOWN_LAYERS))} only"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    # Models with a rope per layer kind nest one dict for each.
    kinds = {str(r.get("rope_type")) for r in [rope, *(v for v in rope.values() if isinstance(v, dict))]}
    if found := sorted(kinds & BATCH_DEPENDENT_ROPE):
        raise BadInput(
            f"policy.path: {path} has rope_type {', '.join(found)}, whose angles depend on the longest sequence beside "
            "one; packing would change a sequence's log-probs with its neighbours"
        )


def probe(
    packed_logprobs: Callable[[PackedBatch], Tensor], logits: Callable[[Tensor], Tensor], vocabulary: int
) -> None:
    """Compare two packed completions of one prompt, and a neighbour, with the model's own logits.

    Args:
        packed_logprobs: of a packed batch, [N], at temperature 1.
        logits: of ids [1, T] by the model's own forward pass, [1, T, V].
        vocabulary: number of known token ids.

    Raises:
        BadInput: they differ by more than `PROBE_TOLERANCE` nats anywhere.
    """
    draw = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return draw.integers(0, vocabulary, count).astype(np.int32)

    shared, other = ids(5), ids(3)
    parts = [(0, shared, ids(4)), (0, shared, ids(2)), (1, other, ids(3))]
    sequences = [
        Sequence(prompt, tokens, np.zeros(len(tokens), np.float32), 0.0, group, np.zeros(len(tokens), np.int32))
        for group, prompt, tokens in parts
    ]
    batch = pack(sequences, (Piece(0, 5, (0, 1), (4, 2)), Piece(1, 3, (2,), (3,))))
    expected = []
    for _, prompt, tokens in parts:
        row = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
        by_token = torch.log_softmax(logits(row)[0, :-1].float(), dim=-1)
        expected.append(by_token.gather(-1, row[0, 1:, None])[len(prompt) - 1 :, 0])
    difference = float((packed_logprobs(batch) - torch.cat(expected)).abs().max())
    if not difference <= PROBE_TOLERANCE:
        raise BadInput(
            f"policy.path: packed sequences give other log-probs than the model's own forward pass (largest difference "
            f"{difference:.3g} nats, allowed {PROBE_TOLERANCE}); its attention or output head does something that the "
            "learner does not represent"
        )
