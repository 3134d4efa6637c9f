import math

import numpy as np
import pytest

from ullim.monitor.summary import lengths, rewards, staleness, summarise
from ullim.records import Completion, FinishReason, Prompt, RolloutGroup, Score


def completion(
    versions: list[int], *, finish: FinishReason = "stop", score: float | None = None, channel: str = "x"
) -> Completion:
    count = len(versions)
    return Completion(
        token_ids=np.arange(count, dtype=np.int32),
        logprobs=np.zeros(count, np.float32),
        versions=np.array(versions, np.int32),
        finish=finish,
        text="",
        scores={channel: Score(None, "failed") if score is None else Score(score)},
    )


def groups(*members: list[Completion]) -> list[RolloutGroup]:
    prompt = Prompt("p", 0, (), np.array([1], np.int32))
    return [RolloutGroup(ticket, prompt, tuple(group), "n") for ticket, group in enumerate(members)]


def scored(*values: float | None) -> list[Completion]:
    return [completion([0], score=value) for value in values]


def test_rewards_by_hand() -> None:
    # Scores 1, 3 | 5, 5, none | 2: mean 16/5; sample variance ((2.2)²+(0.2)²+1.8²+1.8²+1.2²)/4 = 12.8/4.
    # Groups with two scores: sample std of (1, 3) is √2, of (5, 5) is 0.
    metrics = rewards(groups(scored(1, 3), scored(5, 5, None), scored(2)), ["x"])
    assert metrics == {
        "reward/x/mean": pytest.approx(3.2),
        "reward/x/std": pytest.approx(math.sqrt(3.2)),
        "reward/x/group_std": pytest.approx(math.sqrt(2) / 2),
        "reward/x/flat_groups_fraction": 0.5,
        "reward/x/unscored": 1,
    }


def test_a_channel_that_scored_nothing_has_no_numbers_but_a_count() -> None:
    metrics = rewards(groups(scored(None, None), scored(1.0)), ["x", "other"])
    assert metrics["reward/x/mean"] == 1.0
    assert metrics["reward/x/std"] is None
    assert metrics["reward/x/group_std"] is None
    assert metrics["reward/x/flat_groups_fraction"] is None
    assert (metrics["reward/other/mean"], metrics["reward/other/unscored"]) == (None, 3)


def test_lengths_by_hand() -> None:
    # Lengths 0, 1, 2, 3, 10: p10 lies 0.4 of the way from 0 to 1, p90 0.6 of the way from 3 to 10.
    members = [
        completion([0] * count, finish="length" if count > 2 else "aborted" if count == 0 else "stop")
        for count in (10, 0, 3, 1, 2)
    ]
    assert lengths(groups(members[:2], members[2:])) == {
        "length/mean": pytest.approx(3.2),
        "length/p10": pytest.approx(0.4),
        "length/p50": 2.0,
        "length/p90": pytest.approx(7.2),
        "length/max": 10,
        "length/truncated_fraction": 0.4,
    }


def test_staleness_counts_from_the_oldest_token() -> None:
    members = [completion([4, 4]), completion([3, 4, 5]), completion([]), completion([5]), completion([4, 4])]
    assert staleness(groups(members), learner_version=5) == {
        "staleness/mean": pytest.approx((1 + 2 + 0 + 1) / 4),
        "staleness/max": 2,
        "staleness/histogram": {0: 1, 1: 2, 2: 1},
        "staleness/mixed_versions_fraction": 0.25,
    }


def test_a_token_from_the_future_is_an_error() -> None:
    with pytest.raises(ValueError, match="newer than the learner"):
        staleness(groups([completion([6])]), learner_version=5)


def test_a_step_without_groups() -> None:
    metrics = summarise([], ["x"], learner_version=0)
    assert metrics["reward/x/unscored"] == 0
    assert metrics["staleness/histogram"] == {}
    assert {metrics[name] for name in ("reward/x/mean", "length/p50", "staleness/mean")} == {None}
