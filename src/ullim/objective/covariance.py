"""Clip-Cov and KL-Cov: keep entropy by restraining the few tokens that would burn most of it.

Entropy falls in proportion to the covariance of log-probability and advantage (Cui et al., "The Entropy Mechanism of
Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617), and a tiny share of tokens carries nearly all
of it. Selection and effect are apart on purpose: the means, the quota and the ranking belong to the whole optimiser
step, so `*_tokens` choose once, over the step, and the mask is cut into micro-batches with everything else.
"""

import torch
from torch import Tensor

from ullim.objective._masking import LOG_RATIO_LIMIT, at_least_float32, check_mask, check_same_shape, keep


def token_covariance(logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(log π − mean log π) · (A − mean A) per token, means over all unmasked tokens given.

    Args:
        logp: [B, T].
        advantages: [B] (one per row) or [B, T].
        mask: bool [B, T].

    Returns:
        [B, T] detached, in float64 (it decides an ordering), 0 where masked.
    """
    check_same_shape(logp=logp, mask=mask)
    check_mask(mask)
    spread = advantages[:, None].expand_as(logp) if advantages.dim() == 1 else advantages
    check_same_shape(logp=logp, advantages=spread)
    tokens = mask.sum().clamp(min=1)
    with torch.no_grad():
        kept_logp, kept_advantage = keep(logp, mask).double(), keep(spread, mask).double()
        product = (kept_logp - kept_logp.sum() / tokens) * (kept_advantage - kept_advantage.sum() / tokens)
        return keep(product, mask)


def clip_cov_tokens(
    logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    fraction: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    generator: torch.Generator,
) -> Tensor:
    """Clip-Cov's choice: ⌊fraction · tokens⌋ tokens at random among those with low ≤ covariance ≤ high.

    Defaults are the paper's for a 7B model. Fewer candidates than that: all of them. The same generator state gives
    the same choice; the generator lives on the CPU whatever device the tensors are on.

    Returns:
        bool [B, T], true for chosen tokens.
    """
    _check_fraction(fraction)
    if not low <= high:
        raise ValueError(f"low must not exceed high, got {low} and {high}")
    covariance = token_covariance(logp, advantages, mask)
    candidates = (mask & (covariance >= low) & (covariance <= high)).flatten().nonzero().squeeze(-1)
    quota = int(fraction * int(mask.sum()))
    order = torch.randperm(len(candidates), generator=generator).to(candidates.device)
    return _chosen(candidates[order[:quota]], mask)


def kl_cov_tokens(logp: Tensor, advantages: Tensor, mask: Tensor, *, fraction: float = 2e-3) -> Tensor:
    """KL-Cov's choice: the ⌊fraction · tokens⌋ unmasked tokens of largest covariance (earlier places win ties).

    Returns:
        bool [B, T], true for chosen tokens.
    """
    _check_fraction(fraction)
    covariance = token_covariance(logp, advantages, mask)
    ranked = torch.where(mask, covariance, -torch.inf).flatten().argsort(descending=True, stable=True)
    return _chosen(ranked[: int(fraction * int(mask.sum()))], mask)


def clip_cov(per_token: Tensor, chosen: Tensor) -> Tensor:
    """The loss per token [B, T] with the chosen tokens at 0 and without gradient; denominators stay as they are."""
    check_same_shape(per_token=per_token, chosen=chosen)
    return keep(per_token, ~chosen)


def kl_cov(per_token: Tensor, chosen: Tensor, logp: Tensor, old_logp: Tensor, *, coefficient: float = 1.0) -> Tensor:
    """The loss per token [B, T] plus coefficient · KL(π_old ‖ π_θ) at the chosen tokens.

    The KL is the k3 estimate from samples of π_old, r − 1 − log r with r = π_θ/π_old: never negative, unbiased, and its
    gradient (r − 1)∇log π_θ is that of the KL named. It is 0 on the first step from π_old and grows as the token moves.

    Args:
        per_token: loss to add to.
        chosen: bool, from `kl_cov_tokens`.
        logp: log π_θ, with gradient.
        old_logp: log π_old.
        coefficient: β; 1 in the paper.
    """
    check_same_shape(per_token=per_token, chosen=chosen, logp=logp, old_logp=old_logp)
    log_ratio = keep(logp, chosen) - keep(old_logp.detach(), chosen)
    return at_least_float32(per_token) + coefficient * (
        log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).expm1() - log_ratio
    )


def _check_fraction(fraction: float) -> None:
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction must lie in [0, 1], got {fraction}")


def _chosen(places: Tensor, mask: Tensor) -> Tensor:
    chosen = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    chosen[places] = True
    return chosen.view_as(mask)
