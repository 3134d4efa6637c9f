"""From rewards to advantages: how much better each completion was than its siblings.

A group is every completion of one prompt. Groups are known by id, never by place: members may interleave, be missing
or be unscored (NaN), and nobody else's baseline moves. Statistics are taken in float64 whatever comes in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Scale = Literal["group", "batch", "none"]

TIE_TOLERANCE = 1e-12
"""Weighted channels that cancel leave float64 rounding of about 1e-16 of their size; below this share it is a tie."""


@dataclass(frozen=True, slots=True)
class _Groups:
    """Members of a step by group, over the scored ones only. `index` [N] numbers the groups 0..count-1."""

    index: Tensor
    scored: Tensor  # bool [N]
    count: int

    @classmethod
    def of(cls, group_ids: Tensor, scored: Tensor) -> "_Groups":
        ids, index = torch.unique(group_ids, return_inverse=True)
        return cls(index, scored, len(ids))

    def total(self, values: Tensor) -> Tensor:
        """Sum of `values` [N] over the scored members of each group, repeated to [N]."""
        kept = torch.where(self.scored, values, 0.0)
        sums = torch.zeros(self.count, dtype=values.dtype, device=values.device).index_add(0, self.index, kept)
        return sums[self.index]

    def spread(self, values: Tensor) -> Tensor:
        """Largest minus smallest scored value of each group, repeated to [N]; exactly 0 for equal values."""
        start = torch.zeros(self.count, dtype=values.dtype, device=values.device)
        high = torch.where(self.scored, values, -torch.inf)
        low = torch.where(self.scored, values, torch.inf)
        highest = start.scatter_reduce(0, self.index, high, "amax", include_self=False)
        lowest = start.scatter_reduce(0, self.index, low, "amin", include_self=False)
        return (highest - lowest)[self.index]

    def members(self) -> Tensor:
        """Number of scored members of each member's group [N], float64."""
        return self.total(torch.ones(len(self.index), dtype=torch.float64, device=self.index.device))


def group_advantages(rewards: Tensor, group_ids: Tensor, *, scale: Scale = "group", eps: float = 1e-4) -> Tensor:
    """A = (R − mean of the group) / (std + eps), over scored members only.

    Args:
        rewards: float [N]; NaN means unscored.
        group_ids: int [N]; groups may interleave and differ in size.
        scale: `group` divides by the sample std (ddof=1) of the group (GRPO, arXiv 2402.03300), `batch` by that of all
            scored rewards of the tensor (arXiv 2508.08221), `none` divides by nothing (Dr. GRPO, arXiv 2503.20783;
            eps is then unused).
        eps: added to the std.

    Returns:
        [N], in the dtype of `rewards` (float32 for half precision). Exactly 0 for unscored members, groups with fewer
        than two scored members and flat groups (all scored rewards equal: seen by max = min, since a mean of equal
        floats need not equal them).

    Raises:
        ValueError: wrong shapes or dtypes, an infinite reward, an unknown scale.
    """
    _check(rewards, group_ids, "rewards", eps)
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale must be 'group', 'batch' or 'none', got {scale!r}")
    groups = _Groups.of(group_ids, ~rewards.isnan())
    return _normalise(rewards.double(), groups, scale, eps).to(_result_dtype(rewards))


def scored_members(rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Which completions take part in the loss: bool [N], true where every channel of non-zero weight gave a score.

    A completion that one reward failed on is left out as a whole. Giving the missing channel 0 would let the policy
    profit from answers that a reward cannot judge. A channel that does not apply to a prompt should give the group one
    constant: a flat channel adds exactly 0 and excludes nobody.
    """
    _check_names(rewards, weights)
    missing = [scores.isnan() for name, scores in rewards.items() if weights[name] != 0.0]
    first = next(iter(rewards.values()))
    return ~torch.stack(missing).any(dim=0) if missing else torch.zeros_like(first, dtype=torch.bool)


def decoupled_advantages(
    rewards: Mapping[str, Tensor],
    group_ids: Tensor,
    weights: Mapping[str, float],
    *,
    batch_normalize: bool = True,
    eps: float = 1e-4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GDPO (arXiv 2601.05242): normalise each channel by itself, add the weighted channels, normalise over the step.

    part_c = weight_c · (R_c − group mean) / (group std + eps);  S = Σ_c part_c;
    A = (S − mean S) / (std S + eps), mean and sample std over the scored *responses* of the whole step (not tokens).

    One set of scored members (see `scored_members`) serves every channel, so S sums to 0 within each group. The step's
    mean is therefore 0 but for rounding, and a group tied in S (flat, or channels that cancel) belongs at exactly 0
    after the batch step too; it is put there rather than left at rounding noise. Tied groups do count in the step's
    std, as in the paper: the fewer groups say anything, the larger the advantages of those that do.

    Args:
        rewards: by channel name, float [N], NaN = unscored.
        group_ids: int [N].
        weights: by channel name; exactly the channels of `rewards`. Weight 0: the channel neither moves nor excludes.
        batch_normalize: False returns S.
        eps: added to both stds.

    Returns:
        Advantages [N] and the parts by channel [N] (before the batch step); both 0 where unscored.

    Raises:
        ValueError: no channel, a weight without a channel or the reverse, a non-finite weight, wrong shapes.
    """
    scored = scored_members(rewards, weights)
    for name, scores in rewards.items():
        _check(scores, group_ids, f"rewards[{name!r}]", eps)
    groups = _Groups.of(group_ids, scored)
    exact = {
        name: weights[name] * _normalise(scores.double(), groups, "group", eps)
        if weights[name] != 0.0
        else torch.zeros_like(scores, dtype=torch.float64)
        for name, scores in rewards.items()
    }
    stacked = torch.stack(list(exact.values()))
    total = stacked.sum(dim=0)
    size = groups.total(stacked.abs().sum(dim=0))
    tied = groups.spread(total) <= TIE_TOLERANCE * size
    combined = torch.where(scored & ~tied, total, 0.0)
    if batch_normalize and int(scored.sum()) >= 2:
        responses = combined[scored]
        normalised = (combined - responses.mean()) / (responses.std() + eps)
        combined = torch.where(scored & ~tied, normalised, 0.0)
    dtype = _result_dtype(*rewards.values())
    return combined.to(dtype), {name: part.to(dtype) for name, part in exact.items()}


def _normalise(rewards: Tensor, groups: _Groups, scale: Scale, eps: float) -> Tensor:
    members = groups.members()
    centred = rewards - groups.total(rewards) / members.clamp(min=1)
    if scale == "group":
        variance = groups.total(centred.square()) / (members - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)
    elif scale == "batch" and int(groups.scored.sum()) >= 2:
        centred = centred / (rewards[groups.scored].std() + eps)
    # A lone scored member is its own maximum and minimum, so this rules out the small groups as well as the flat ones.
    informative = groups.scored & (groups.spread(rewards) > 0)
    return torch.where(informative, centred, 0.0)


def _check(rewards: Tensor, group_ids: Tensor, name: str, eps: float) -> None:
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"{name} and group_ids must be [N], got {tuple(rewards.shape)} and {tuple(group_ids.shape)}")
    if not rewards.is_floating_point() or group_ids.is_floating_point():
        raise ValueError(f"{name} must be float and group_ids int, got {rewards.dtype} and {group_ids.dtype}")
    if bool(rewards.isinf().any()):
        raise ValueError(f"{name} has an infinite value; a reward is finite, or NaN where there is none")
    if not eps >= 0.0:
        raise ValueError(f"eps must be at least 0, got {eps}")


def _check_names(rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> None:
    if not rewards:
        raise ValueError("rewards has no channel; give at least one")
    unknown, unweighted = sorted(weights.keys() - rewards.keys()), sorted(rewards.keys() - weights.keys())
    if unknown:
        raise ValueError(f"weights names unknown channels {unknown}; the channels are {sorted(rewards)}")
    if unweighted:
        raise ValueError(f"channels {unweighted} have no weight; write 0.0 for a channel that is only logged")
    for name, weight in weights.items():
        if not torch.tensor(float(weight)).isfinite():
            raise ValueError(f"weights[{name!r}] must be finite, got {weight}")


def _result_dtype(*rewards: Tensor) -> torch.dtype:
    return torch.float64 if any(r.dtype == torch.float64 for r in rewards) else torch.float32
