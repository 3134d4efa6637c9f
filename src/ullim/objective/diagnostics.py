"""What a step says about itself: mismatch, correction, ratio, entropy, staleness, rewards and channel shares.

The per-token diagnostics return a `Tally` to be merged over micro-batches and ranks; the per-step ones, which the
controller computes once from everything, return numbers by logged name.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ullim.objective._masking import LOG_RATIO_LIMIT, keep
from ullim.objective.importance import CorrectionMode, invalid_rollout, within_bounds
from ullim.objective.losses import per_token_advantages
from ullim.objective.tally import Tally, difference_histogram

__all__ = [
    "Staleness",
    "Tally",
    "advantage_shares",
    "correction_tally",
    "entropy_tally",
    "loss_tally",
    "mismatch_tally",
    "ratio_tally",
    "reference_tally",
    "reward_statistics",
]


@torch.no_grad()
def mismatch_tally(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> Tally:
    """How far the learner's π_old is from the engine's μ on the sampled tokens; all tensors [B, T].

    With d = log π_old − log μ over unmasked tokens with a usable log μ: `k1` = mean(−d) and `k3` = mean(e^d − 1 − d),
    both estimates of KL(μ ‖ π_old) since μ drew the tokens; `logprob_diff_mean` and `_p99` of |d|; `max_prob_diff` =
    max |π_old − μ|; `missing_tokens` and `missing_fraction` count tokens without a usable log μ.
    """
    missing = invalid_rollout(rollout_logp, mask)
    valid = mask & ~missing
    old, rollout = keep(old_logp, valid).double(), keep(rollout_logp, valid).double()
    d = old - rollout
    size = d.abs()
    return Tally.of(
        {
            "mismatch_tokens": valid.sum(),
            "mismatch_missing": missing.sum(),
            "mismatch_k1": -d.sum(),
            "mismatch_k3": (d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).expm1() - d).sum(),
            "mismatch_difference": size.sum(),
            "prob_difference": _largest((old.exp() - rollout.exp()).abs()),
        },
        histogram=difference_histogram(size[valid]),
    )


@torch.no_grad()
def correction_tally(
    raw: Tensor,
    weights: Tensor,
    mask: Tensor,
    *,
    mode: CorrectionMode = "truncate",
    cap: float = 2.0,
    floor: float | None = None,
) -> Tally:
    """The correction before and after bounding, from `raw_correction` and `correction_weights`, [B, T] over `mask`.

    `weight_mean` and `ess` are of the weights used, `weight_mean_raw`, `weight_max_raw`, `ess_raw` of those before;
    ess = (Σw)²/(N Σw²). `capped_fraction` is the share of tokens whose raw weight lies above the cap (`truncate`),
    outside [floor, cap] (`mask`), or would lie above it (`none`).
    """
    raw, weights = keep(raw, mask).double(), keep(weights, mask).double()
    bounded = mask & ~within_bounds(raw, cap=cap, floor=floor if mode == "mask" else None)
    return Tally.of(
        {
            "weight_tokens": mask.sum(),
            "weight": weights.sum(),
            "weight_square": weights.square().sum(),
            "raw": raw.sum(),
            "raw_square": raw.square().sum(),
            "raw_max": _largest(raw),
            "capped": bounded.sum(),
        }
    )


@torch.no_grad()
def ratio_tally(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tally:
    """How often the clip of `clipped_surrogate` takes the gradient, as shares of the unmasked tokens.

    `clip_low_fraction`: r < 1 − clip_low and A < 0. `clip_high_fraction`: r > 1 + clip_high and A > 0.
    `dual_clip_fraction`: r > dual_clip and A < 0. Outside the interval on the other side the gradient goes on, and that
    is not counted. Also the mean and largest r. ratio [B, T], advantages [B] or [B, T].
    """
    advantage = keep(per_token_advantages(advantages, ratio), mask)
    ratio = keep(ratio, mask).double()
    dual = torch.zeros_like(mask) if dual_clip is None else mask & (ratio > dual_clip) & (advantage < 0)
    return Tally.of(
        {
            "ratio_tokens": mask.sum(),
            "ratio": ratio.sum(),
            "ratio_max": _largest(ratio),
            "clipped_low": (mask & (ratio < 1.0 - clip_low) & (advantage < 0)).sum(),
            "clipped_high": (mask & (ratio > 1.0 + clip_high) & (advantage > 0)).sum(),
            "dual_clipped": dual.sum(),
        }
    )


@torch.no_grad()
def entropy_tally(entropy: Tensor, mask: Tensor) -> Tally:
    """`entropy`: mean over the unmasked tokens, nats; [B, T]."""
    return Tally.of({"entropy_tokens": mask.sum(), "entropy": keep(entropy, mask).double().sum()})


@torch.no_grad()
def reference_tally(kl: Tensor, mask: Tensor) -> Tally:
    """`kl/reference`: mean of `kl_estimate` over the unmasked tokens; [B, T]."""
    return Tally.of({"reference_tokens": mask.sum(), "reference_kl": keep(kl, mask).double().sum()})


@torch.no_grad()
def loss_tally(policy: Tensor, kl: Tensor, entropy: Tensor) -> Tally:
    """`loss/{policy,kl,entropy}`: scalars already divided by the step's denominator, so they simply add up."""
    parts = {"loss_policy": policy, "loss_kl": kl, "loss_entropy": entropy}
    return Tally.of(parts | {"loss_parts": torch.ones((), device=policy.device)})


@dataclass(frozen=True, slots=True)
class Staleness:
    """Lags of the consumed completions (learner version − oldest token version) and how many were dropped."""

    lags: Mapping[int, int]  # how many completions had which lag
    dropped: int = 0

    @classmethod
    def of(cls, lags: Iterable[int], dropped: int = 0) -> "Staleness":
        """From one lag per consumed completion; ValueError for a negative lag (a token from the future)."""
        histogram = Counter(lags)
        if histogram and min(histogram) < 0:
            raise ValueError(f"a lag is at least 0, got {min(histogram)}: a token is newer than the learner")
        return cls(dict(sorted(histogram.items())), dropped)

    def merge(self, other: "Staleness") -> "Staleness":
        """Both together."""
        total = Counter(self.lags) + Counter(other.lags)
        return Staleness(dict(sorted(total.items())), self.dropped + other.dropped)

    def finalise(self) -> dict[str, float]:
        """`staleness/{mean,max,dropped}` and `staleness/histogram/<lag>` (counts); no lag seen: only `dropped`."""
        numbers = {"staleness/dropped": float(self.dropped)}
        if count := sum(self.lags.values()):
            numbers["staleness/mean"] = sum(lag * n for lag, n in self.lags.items()) / count
            numbers["staleness/max"] = float(max(self.lags))
            numbers |= {f"staleness/histogram/{lag}": float(n) for lag, n in self.lags.items()}
        return numbers


@torch.no_grad()
def advantage_shares(parts: Mapping[str, Tensor]) -> dict[str, float]:
    """`advantage/<channel>/share`: Σ|part_c| / Σ_c Σ|part_c| over the step's completions, from the parts of GDPO.

    Shares lie in [0, 1] and add up to 1. Absolute values, because channels that cancel do pull; every share is 0 where
    all channels are flat, since then nothing moves anything.
    """
    sizes = {name: float(part.double().abs().sum()) for name, part in parts.items()}
    total = sum(sizes.values())
    return {f"advantage/{name}/share": size / total if total > 0 else 0.0 for name, size in sizes.items()}


@torch.no_grad()
def reward_statistics(rewards: Mapping[str, Tensor], group_ids: Tensor) -> dict[str, float]:
    """`reward/<channel>/{mean,std,group_std,scored_fraction}` over the scored completions of a step.

    std: sample std (ddof=1) over all of them. group_std: mean over the groups with at least two scored members of their
    sample std; near 0 it says that the channel no longer tells siblings apart. What is undefined is absent.
    rewards float [N] by channel, NaN = unscored; group_ids int [N].
    """
    numbers: dict[str, float] = {}
    for name, scores in rewards.items():
        scored = ~scores.isnan()
        values = scores[scored].double()
        numbers[f"reward/{name}/scored_fraction"] = len(values) / max(len(scores), 1)
        if len(values) >= 1:
            numbers[f"reward/{name}/mean"] = float(values.mean())
        if len(values) >= 2:
            numbers[f"reward/{name}/std"] = float(values.std())
        ids = group_ids[scored]
        groups = [values[ids == group] for group in torch.unique(ids)]
        spreads = [float(group.std()) for group in groups if len(group) >= 2]
        if spreads:
            numbers[f"reward/{name}/group_std"] = sum(spreads) / len(spreads)
    return numbers


def _largest(values: Tensor) -> Tensor:
    """Maximum of non-negative values, 0 of none."""
    return values.amax() if values.numel() else values.new_zeros(())
