"""Three habits that every function of the room shares: enough precision, clean masked places, bounded exponents."""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Bound of |log-ratio| before exp. e^20 = 4.9e8: far beyond any ratio that clipping or capping leaves alone, and its
square is still finite in float32. Without it one broken token makes the whole step's loss infinite."""


def at_least_float32(values: Tensor) -> Tensor:
    """`values` in float32, or unchanged where they are float64 (bfloat16 differences of log-probs lose 2-3 digits)."""
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """`values` in at least float32, and exactly 0 where `mask` is false.

    Call it BEFORE arithmetic, not after: torch.where stops a gradient at a masked place only if the operation behind
    it has a finite derivative; 0 · inf would bring the NaN of a padding token back into every weight.
    """
    values = at_least_float32(values)
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of the log-ratio clamped to ±`LOG_RATIO_LIMIT`; NaN stays NaN, so that the learner can see and skip it."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def check_same_shape(**tensors: Tensor) -> None:
    """ValueError naming the tensors where they are not all of one shape (broadcasting would hide a lost axis)."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"tensors must have one shape, got {', '.join(f'{n} {s}' for n, s in shapes.items())}")


def check_mask(mask: Tensor) -> None:
    """ValueError where `mask` is not boolean: a 0/1 integer mask would silently act as an index."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be a bool tensor, got {mask.dtype}; write mask.bool()")
