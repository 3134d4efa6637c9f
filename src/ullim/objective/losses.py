"""The terms of the loss, per token, and how tokens become one number.

Everything here is to be minimised. Per-token tensors are [B, T], one row per completion; masks are bool and come from
lengths. Denominators are those of the whole optimiser step: see `aggregate`.
"""

from typing import Literal

import torch
from torch import Tensor

from ullim.objective._masking import LOG_RATIO_LIMIT, at_least_float32, check_mask, check_same_shape, keep
from ullim.objective.covariance import clip_cov, clip_cov_tokens, kl_cov, kl_cov_tokens, token_covariance

Aggregation = Literal["token-mean", "sequence-mean", "constant"]
KLKind = Literal["k1", "k2", "k3"]

__all__ = [
    "Aggregation",
    "KLKind",
    "aggregate",
    "clip_cov",
    "clip_cov_tokens",
    "clipped_surrogate",
    "kl_cov",
    "kl_cov_tokens",
    "kl_estimate",
    "overlong_penalty",
    "per_token_advantages",
    "token_covariance",
]


def per_token_advantages(advantages: Tensor, like: Tensor) -> Tensor:
    """Advantages [B] (one per row) or [B, T] in the shape [B, T] of `like`, detached, in at least float32."""
    advantages = at_least_float32(advantages.detach())
    if advantages.shape == like.shape:
        return advantages
    if advantages.dim() == 1 and like.dim() == 2 and advantages.shape[0] == like.shape[0]:
        return advantages[:, None].expand_as(like)
    raise ValueError(
        f"advantages must be [B] or [B, T] for [B, T] = {tuple(like.shape)}, got {tuple(advantages.shape)}"
    )


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """−min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A) per token: PPO (arXiv 1707.06347), two widths from DAPO
    (arXiv 2503.14476).

    With `dual_clip` = c, where A < 0 the loss is at most −c·A (arXiv 1912.09729): otherwise a token that became likely
    although its answer was bad has an unbounded loss.

    Args:
        ratio: [B, T] from `policy_ratio`, 0 where masked.
        advantages: [B] or [B, T]; no gradient is taken.
        clip_low: width below 1, in [0, 1].
        clip_high: width above 1, at least 0.
        dual_clip: None, or c > 1; usual is 3.

    Returns:
        [B, T]. Masked places hold numbers without meaning; `aggregate` leaves them out.

    Raises:
        ValueError: a width or c out of range, advantages of another shape.
    """
    check_clip(clip_low, clip_high, dual_clip)
    advantage = per_token_advantages(advantages, ratio)
    objective = torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage)
    if dual_clip is not None:
        bounded = torch.maximum(objective, dual_clip * advantage)
        objective = torch.where(advantage < 0, bounded, objective)
    return -objective


def check_clip(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    """ValueError where a clip width is out of range."""
    if not 0.0 <= clip_low <= 1.0:
        raise ValueError(f"clip_low must lie in [0, 1], got {clip_low}")
    if not clip_high >= 0.0:
        raise ValueError(f"clip_high must be at least 0, got {clip_high}")
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip must exceed 1, got {dual_clip}")


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    *,
    mode: Aggregation = "token-mean",
    denominator: float | Tensor | None = None,
) -> Tensor:
    """One number from a loss per token.

    `token-mean`: Σ tokens / number of tokens (DAPO). `sequence-mean`: Σ rows (mean of the row's tokens) / number of
    non-empty rows (GRPO). `constant`: Σ tokens / (sequences × token budget) (Dr. GRPO, arXiv 2503.20783).

    The denominator belongs to the whole optimiser step over all micro-batches and ranks. Given it, the values of any
    partition of the rows add up to the value of the whole, and so do the gradients.

    Args:
        per_token: [B, T]; what stands at masked places changes nothing.
        mask: bool [B, T].
        mode: see above.
        denominator: the step's tokens, sequences, or sequences × budget; None: that of this tensor.

    Returns:
        Scalar in at least float32. Nothing unmasked: exactly 0, with a zero gradient.

    Raises:
        ValueError: unequal shapes, a mask that is not bool, an unknown mode, `constant` without a denominator, a
            denominator that is not positive though something is unmasked.
    """
    check_same_shape(per_token=per_token, mask=mask)
    check_mask(mask)
    if mode not in ("token-mean", "sequence-mean", "constant"):
        raise ValueError(f"mode must be 'token-mean', 'sequence-mean' or 'constant', got {mode!r}")
    kept = keep(per_token, mask)
    if mode == "sequence-mean":
        kept = kept / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    total = kept.sum()
    if denominator is None:
        if mode == "constant":
            raise ValueError("mode='constant' needs denominator: the step's sequences × token budget")
        denominator = (mask.any(dim=-1) if mode == "sequence-mean" else mask).sum().clamp(min=1)
    elif isinstance(denominator, float | int) and not denominator > 0:
        # A rank may hold nothing in a step in which nobody holds anything; only then is 0 a true count.
        if bool(mask.any()) or denominator != 0:
            raise ValueError(
                f"denominator must be positive, got {denominator}; it counts the whole step, not this rank"
            )
        denominator = 1.0
    return total / denominator


def kl_estimate(logp: Tensor, ref_logp: Tensor, *, kind: KLKind, mask: Tensor | None = None) -> Tensor:
    """Per-token estimate of KL(π_θ ‖ π_ref) from samples of π_θ (Schulman, "Approximating KL Divergence", 2020).

    With d = log π_ref − log π_θ:  k1 = −d (unbiased, may be negative),  k2 = d²/2 (biased, ≥ 0; its on-policy gradient
    is exactly that of the KL),  k3 = e^d − 1 − d (unbiased, ≥ 0; its gradient is that of the reversed KL near d = 0).
    As a loss, k1 has an expected gradient of 0 on-policy, so it measures but does not restrain.

    Args:
        logp: log π_θ, any shape, with gradient.
        ref_logp: log π_ref, same shape; no gradient is taken.
        kind: `k1`, `k2` or `k3`; k3 clamps d to ±20 before exp.
        mask: bool, same shape. Given it, masked places are 0 and pass no gradient, whatever stands there.

    Returns:
        Same shape, at least float32.

    Raises:
        ValueError: unequal shapes, an unknown kind.
    """
    check_same_shape(logp=logp, ref_logp=ref_logp)
    if mask is not None:
        check_same_shape(logp=logp, mask=mask)
        check_mask(mask)
        logp, ref_logp = keep(logp, mask), keep(ref_logp, mask)
    d = at_least_float32(ref_logp.detach()) - at_least_float32(logp)
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        # expm1, not exp − 1: for the usual tiny d the difference of two ones would be all rounding.
        return d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).expm1() - d
    raise ValueError(f"kind must be 'k1', 'k2' or 'k3', got {kind!r}")


def overlong_penalty(lengths: Tensor, *, limit: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4), a reward in [−1, 0] to be added.

    0 up to limit − buffer, then ((limit − buffer) − length) / buffer, which falls to −1 at the limit, −1 beyond it.

    Args:
        lengths: [N], in tokens, int or float.
        limit: longest allowed length, in tokens.
        buffer: how many tokens before the limit the punishment begins, 0 ≤ buffer ≤ limit (0: a step at the limit).

    Returns:
        float32 [N].

    Raises:
        ValueError: limit or buffer out of range.
    """
    if limit <= 0 or not 0 <= buffer <= limit:
        raise ValueError(f"need limit > 0 and 0 <= buffer <= limit, got limit={limit}, buffer={buffer}")
    # Integers first: past 2^24 tokens float32 could not tell neighbouring lengths apart.
    excess = lengths - (limit - buffer)
    if buffer == 0:
        return -(excess > 0).to(torch.float32)
    return -(excess.to(torch.float32) / buffer).clamp(0.0, 1.0)
