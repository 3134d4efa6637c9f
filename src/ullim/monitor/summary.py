"""A step's rollouts in numbers: reward, length and staleness, by pure functions of groups.

Each statistic is over the completions it names, once over the whole step: no mean of means, so that a group that
lost a member weighs no more than its completions. None stands for "nothing to measure".
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ullim.monitor.metrics import Metric
from ullim.objective.diagnostics import Staleness, reward_statistics
from ullim.records import Completion, RolloutGroup


def summarise(groups: Sequence[RolloutGroup], channels: Iterable[str], learner_version: int) -> dict[str, Metric]:
    """All metrics of this module for the groups that one step consumes at `learner_version`."""
    return {**rewards(groups, channels), **lengths(groups), **staleness(groups, learner_version)}


def rewards(groups: Sequence[RolloutGroup], channels: Iterable[str]) -> dict[str, Metric]:
    """`reward/<channel>/...` of each channel.

    mean, std            over all scored completions (sample std)
    group_std            mean over groups with two or more scored members of their sample std: what GRPO learns from
    flat_groups_fraction share of those groups in which all scores are equal: they teach nothing
    unscored             completions without a score of this channel (count)
    """
    group_ids = torch.tensor([place for place, group in enumerate(groups) for _ in group.completions])
    metrics: dict[str, Metric] = {}
    for channel in channels:
        by_group = [_scores(group.completions, channel) for group in groups]
        scores = torch.tensor([value for values in by_group for value in values], dtype=torch.float64)
        numbers = reward_statistics({channel: scores}, group_ids)
        flat = [len(set(values)) == 1 for values in map(_scored, by_group) if len(values) > 1]
        name = f"reward/{channel}"
        for statistic in ("mean", "std", "group_std"):
            metrics[f"{name}/{statistic}"] = numbers.get(f"{name}/{statistic}")
        metrics[f"{name}/flat_groups_fraction"] = sum(flat) / len(flat) if flat else None
        metrics[f"{name}/unscored"] = int(scores.isnan().sum())
    return metrics


def lengths(groups: Sequence[RolloutGroup]) -> dict[str, Metric]:
    """`length/...` in tokens, a sampled stop token included; percentiles interpolate linearly.

    truncated_fraction is the share of completions that the engine ended for length.
    """
    completions = _completions(groups)
    if not completions:
        return {f"length/{name}": None for name in ("mean", "p10", "p50", "p90", "max", "truncated_fraction")}
    tokens = np.array([len(completion.token_ids) for completion in completions])
    p10, p50, p90 = np.percentile(tokens, [10, 50, 90])
    return {
        "length/mean": float(tokens.mean()),
        "length/p10": float(p10),
        "length/p50": float(p50),
        "length/p90": float(p90),
        "length/max": int(tokens.max()),
        "length/truncated_fraction": sum(c.finish == "length" for c in completions) / len(completions),
    }


def staleness(groups: Sequence[RolloutGroup], learner_version: int) -> dict[str, Metric]:
    """`staleness/...` of completions with a token: lag = learner version - oldest token version.

    histogram maps a lag to the number of completions with it; mixed_versions_fraction is the share of completions
    that lived through a weight update. ValueError for a token newer than the learner.
    """
    versions = [completion.versions for completion in _completions(groups) if len(completion.versions)]
    if not versions:
        return {
            "staleness/mean": None,
            "staleness/max": None,
            "staleness/histogram": {},
            "staleness/mixed_versions_fraction": None,
        }
    lags = Staleness.of(learner_version - int(array.min()) for array in versions)
    numbers = lags.finalise()
    mixed = sum(int(array.min()) != int(array.max()) for array in versions)
    return {
        "staleness/mean": numbers["staleness/mean"],
        "staleness/max": numbers["staleness/max"],
        "staleness/histogram": dict(lags.lags),
        "staleness/mixed_versions_fraction": mixed / len(versions),
    }


def _completions(groups: Sequence[RolloutGroup]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


def _scores(completions: Sequence[Completion], channel: str) -> list[float]:
    """One number a completion, NaN where it has no score."""
    scores = (completion.scores.get(channel) for completion in completions)
    return [math.nan if score is None or score.value is None else score.value for score in scores]


def _scored(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]
