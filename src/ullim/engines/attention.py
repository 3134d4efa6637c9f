"""Our attention inside any Hugging Face causal LM.

All tokens of a forward pass, whichever sequences they belong to, travel as one row [1, T]: linear layers do not
care, so nothing is padded. Only attention must know who may look at whom. That knowledge is a *plan*, current
for the length of one forward pass; the model reaches it through two seams that transformers offers: a `Cache`
whose `update` stores keys and values where the plan says, and an attention function registered by name.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from ullim.errors import BadInput

ATTENTION_NAME = "ullim_slots"


class AttentionPlan(Protocol):
    """Who may look at whom in one forward pass. T is its number of tokens."""

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the new keys and values, each [heads, T, dim]."""
        ...

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attention of `query` [query heads, T, dim]; returns [T, query heads, value_dim]."""
        ...


class _Current(threading.local):
    """The plan of the forward pass running on this thread; engines in one process have a thread each."""

    plan: AttentionPlan | None = None
    layer: int = -1


_current = _Current()


@contextmanager
def use_plan(plan: AttentionPlan) -> Iterator["PlannedCache"]:
    """Make `plan` current for one forward pass; yields the cache to hand to the model."""
    _current.plan, _current.layer = plan, -1
    try:
        yield PlannedCache(layers=[])
    finally:
        _current.plan = None


class PlannedCache(Cache):  # type: ignore[misc]  # transformers is untyped to mypy
    """A cache that keeps nothing itself: every layer's keys and values go to the current plan."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plan = _plan()
        _current.layer = layer_idx
        plan.store(layer_idx, key_states[0], value_states[0])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def planned_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: query [1, heads, T, dim] to [1, T, heads, value_dim]."""
    plan = _plan()
    layer = getattr(module, "layer_idx", _current.layer)
    if layer != _current.layer:
        # Layers that reuse another layer's keys would read a store that this plan never filled.
        raise BadInput(
            f"{type(module).__name__}: layer {layer} attends without caching keys of its own (last cached: layer "
            f"{_current.layer}); the embedded engine needs one cache per attention layer"
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise BadInput(
                f"{type(module).__name__}: attention argument {name!r} is not supported by the embedded engine; "
                f"use the vLLM engine for this model"
            )
    return plan.attend(layer, query[0], key[0], value[0], scaling).unsqueeze(0), None


def _plan() -> AttentionPlan:
    if _current.plan is None:
        raise RuntimeError(f"attention {ATTENTION_NAME!r} works only inside use_plan()")
    return _current.plan


AttentionInterface.register(ATTENTION_NAME, planned_attention)
