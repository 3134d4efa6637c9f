"""Importance ratios: how the trained policy, the policy at the start of the batch and the engine differ.

Three distributions meet here. π_θ is being trained, π_old is the learner's own at the start of the batch, μ is the one
the engine sampled from (other kernels, perhaps older weights). `policy_ratio` is π_θ/π_old and carries the gradient;
`correction_weights` is π_old/μ, detached, and covers engine mismatch and version mismatch by one definition.
All tensors are [B, T]: one row per completion. What stands at masked places never matters, forward or backward.
"""

from typing import Literal

import torch
from torch import Tensor

from ullim.objective._masking import bounded_exp, check_mask, check_same_shape, keep

RatioLevel = Literal["token", "sequence", "sequence_token"]
CorrectionMode = Literal["truncate", "mask", "none"]
CorrectionLevel = Literal["token", "sequence", "geometric"]


def policy_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor, *, level: RatioLevel = "token") -> Tensor:
    """r = π_θ/π_old from log-probs [B, T]; log-ratios are clamped to ±20 before exp.

    `token`: one ratio per token (GRPO). `sequence`: s = exp(mean log-ratio over the row's unmasked tokens), repeated
    over them (GSPO, arXiv 2507.18071). `sequence_token`: the value of s, but the gradient of each place runs
    through its own token only: sg[s] · π_θ/sg[π_θ] (GSPO-token, same paper).

    Args:
        logp: log π_θ, with gradient.
        old_logp: log π_old; no gradient is taken.
        mask: bool; true for completion tokens.
        level: see above.

    Returns:
        [B, T] in at least float32, 0 where masked.

    Raises:
        ValueError: unequal shapes, a mask that is not bool, an unknown level.
    """
    check_same_shape(logp=logp, old_logp=old_logp, mask=mask)
    check_mask(mask)
    logp = keep(logp, mask)
    log_ratio = logp - keep(old_logp.detach(), mask)
    if level == "token":
        ratio = bounded_exp(log_ratio)
    elif level == "sequence":
        ratio = bounded_exp(_row_mean(log_ratio, mask)).expand_as(log_ratio)
    elif level == "sequence_token":
        ratio = bounded_exp(_row_mean(log_ratio.detach(), mask)) * (logp - logp.detach()).exp()
    else:
        raise ValueError(f"level must be 'token', 'sequence' or 'sequence_token', got {level!r}")
    return keep(ratio, mask)


def invalid_rollout(rollout_logp: Tensor, mask: Tensor) -> Tensor:
    """Unmasked tokens without a usable engine log-prob (NaN, ±inf), bool [B, T]: they get weight 1 and are counted."""
    check_same_shape(rollout_logp=rollout_logp, mask=mask)
    check_mask(mask)
    return mask & ~rollout_logp.isfinite()


def raw_correction(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, *, level: CorrectionLevel = "token") -> Tensor:
    """π_old/μ before any truncation or masking, detached, [B, T]: what the diagnostics must show.

    `token`: per token. `sequence`: the product over the row (exp of the summed log-ratio). `geometric`: its geometric
    mean (exp of the mean). Log-ratios are clamped to ±20 before exp. A token without a usable engine log-prob counts as
    ratio 1: weight 1 at token level, no factor in a product, no member of a mean. 0 where masked.
    """
    check_same_shape(old_logp=old_logp, rollout_logp=rollout_logp, mask=mask)
    valid = mask & ~invalid_rollout(rollout_logp, mask)
    with torch.no_grad():
        log_ratio = keep(old_logp, valid) - keep(rollout_logp, valid)
        if level == "sequence":
            log_ratio = log_ratio.sum(dim=-1, keepdim=True).expand_as(log_ratio)
        elif level == "geometric":
            log_ratio = _row_mean(log_ratio, valid).expand_as(log_ratio)
        elif level != "token":
            raise ValueError(f"level must be 'token', 'sequence' or 'geometric', got {level!r}")
        return keep(bounded_exp(log_ratio), mask)


def correction_weights(
    old_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    *,
    mode: CorrectionMode = "truncate",
    level: CorrectionLevel = "token",
    cap: float = 2.0,
    floor: float | None = None,
) -> Tensor:
    """w = sg[π_old/μ], bounded: the factor on each token's loss that makes engine samples count as learner samples.

    `truncate`: min(w, cap), truncated importance sampling (as ρ̄ in IMPALA, arXiv 1802.01561). `mask`: w where
    floor ≤ w ≤ cap and 0 elsewhere (IcePop, arXiv 2510.18855, at token level). `none`: 1.
    Levels as in `raw_correction`; `geometric` bounds a mean, not a likelihood ratio, so it may only mask.

    Args:
        old_logp: log π_old [B, T].
        rollout_logp: log μ [B, T]; NaN, ±inf = missing, see `invalid_rollout`.
        mask: bool [B, T].
        mode, level: see above.
        cap: largest weight, > 0.
        floor: smallest weight that mode `mask` keeps (None: no lower bound).

    Returns:
        [B, T] detached, 0 where masked.

    Raises:
        ValueError: unequal shapes, unknown mode or level, `geometric` outside mode `mask`, a floor in mode `truncate`,
            bounds out of range.
    """
    check_correction(mode, level, cap, floor)
    raw = raw_correction(old_logp, rollout_logp, mask, level=level)
    if mode == "none":
        return mask.to(raw.dtype)
    if mode == "truncate":
        return raw.clamp(max=cap)
    # A missing log-prob says nothing against its token, so it keeps weight 1 whatever the bounds are.
    untested = invalid_rollout(rollout_logp, mask) if level == "token" else torch.zeros_like(mask)
    return keep(raw, within_bounds(raw, cap=cap, floor=floor) | untested)


def within_bounds(raw: Tensor, *, cap: float, floor: float | None = None) -> Tensor:
    """floor ≤ raw ≤ cap, bool [B, T]; NaN counts as within, so that a broken learner shows as NaN and not as a 0."""
    outside = raw > cap if floor is None else (raw > cap) | (raw < floor)
    return ~outside


def check_correction(mode: CorrectionMode, level: CorrectionLevel, cap: float, floor: float | None) -> None:
    """ValueError where the settings of a correction contradict each other; the message says what to write."""
    if mode not in ("truncate", "mask", "none"):
        raise ValueError(f"mode must be 'truncate', 'mask' or 'none', got {mode!r}")
    if level not in ("token", "sequence", "geometric"):
        raise ValueError(f"level must be 'token', 'sequence' or 'geometric', got {level!r}")
    if level == "geometric" and mode != "mask":
        raise ValueError(
            f"level='geometric' is for mode='mask' only, got mode={mode!r}; use level 'token' or 'sequence'"
        )
    if not 0.0 < cap < float("inf"):
        raise ValueError(f"cap must be positive and finite, got {cap}")
    if floor is not None and mode == "truncate":
        raise ValueError(f"floor={floor} has no meaning in mode='truncate'; write mode='mask' or leave floor out")
    if floor is not None and not 0.0 <= floor <= cap:
        raise ValueError(f"floor must lie in [0, cap={cap}], got {floor}")


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the unmasked places of each row, [B, 1]; 0 for an empty row. `values` are 0 where masked."""
    return values.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)
