"""Which Hugging Face models the embedded engine can run, found out by running one."""

from collections.abc import Sequence
from typing import Any

import torch

from ullim.engines.attention import ATTENTION_NAME, use_plan
from ullim.engines.kvcache import LayerShape
from ullim.engines.plans import Segment, ShapeRecorder
from ullim.errors import BadInput

_USE_VLLM = "use the vLLM engine for this model"


def check_suitable(model: Any, *, max_context: int, device: torch.device) -> list[LayerShape]:
    """Switch `model` to our attention and return what each layer caches; BadInput if the model cannot be ours.

    Two short sequences go through in one packed pass and, apart, through the model's own attention; both must give
    the same logits. That finds what no list of architectures would: recurrent state, masks of a model's own, layers
    that share caches.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    _check_config(config, max_context, name)
    if not getattr(model, "_supports_attention_backend", False):
        raise BadInput(f"model: {name} does not take attention functions from outside; {_USE_VLLM}")
    count = int(config.vocab_size)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(count, (length,), generator=generator).to(device) for length in (5, 9)]
    with torch.inference_mode():
        expected = torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences])
        model.set_attn_implementation(ATTENTION_NAME)
        if config._attn_implementation != ATTENTION_NAME:
            raise BadInput(f"model: {name} refuses a change of its attention; {_USE_VLLM}")
        plan = ShapeRecorder([Segment(0, 5), Segment(5, 14)])
        with use_plan(plan) as cache:
            found = model(
                input_ids=torch.cat(sequences)[None],
                position_ids=torch.cat([torch.arange(5, device=device), torch.arange(9, device=device)])[None],
                past_key_values=cache,
                use_cache=True,
            ).logits[0]
    if not plan.shapes:
        raise BadInput(f"model: {name} caches no keys and values (a state-space model?); {_USE_VLLM}")
    error = _relative_error(found.float(), expected.float())
    allowed = 1e-3 if found.dtype == torch.float32 else 0.1
    if not error <= allowed:
        raise BadInput(
            f"model: {name} gives other logits when sequences are packed (relative error {error:.3g}, at most "
            f"{allowed:g} is rounding); its attention or state is of a kind that the embedded engine lacks; {_USE_VLLM}"
        )
    return _in_layer_order(plan.shapes, name)


def _check_config(config: Any, max_context: int, name: str) -> None:
    window = getattr(config, "sliding_window", None)
    layer_types: Sequence[str] = getattr(config, "layer_types", None) or ()
    windowed = any("sliding" in kind or "chunked" in kind for kind in layer_types)
    if not layer_types:
        windowed = bool(window) and getattr(config, "use_sliding_window", True)
    if windowed and (window is None or window < max_context):
        raise BadInput(
            f"max_context: {max_context} tokens, but the model attends over a window of {window}; "
            f"set max_context to at most {window} or {_USE_VLLM}"
        )
    strange = sorted({k for k in layer_types if not k.endswith("attention") or k == "linear_attention"})
    if strange:
        raise BadInput(f"model: {name} has layers of type {strange}, which keep no keys and values; {_USE_VLLM}")
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_context > limit:
        raise BadInput(f"max_context: {max_context} tokens, but the model has {limit} positions")


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, in units of the expected logits' own spread."""
    return float((found - expected).square().mean().sqrt() / expected.std().clamp(min=1e-12))


def _in_layer_order(shapes: dict[int, LayerShape], name: str) -> list[LayerShape]:
    if sorted(shapes) != list(range(len(shapes))):
        raise BadInput(f"model: {name} caches only layers {sorted(shapes)}; {_USE_VLLM}")
    return [shapes[layer] for layer in range(len(shapes))]
