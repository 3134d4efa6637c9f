"""Diagnostics by hand, and the property that makes them worth logging: any partition merges to the whole."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullim.objective.diagnostics import (
    Staleness,
    Tally,
    advantage_shares,
    correction_tally,
    entropy_tally,
    loss_tally,
    mismatch_tally,
    ratio_tally,
    reference_tally,
    reward_statistics,
)
from ullim.objective.importance import correction_weights, raw_correction
from ullim.objective.tally import BINS, difference_histogram

NAN = float("nan")


def logs(rows):
    return torch.log(torch.tensor(rows, dtype=torch.float64))


def test_mismatch_hand_worked():
    # π_old / μ = 2, ½ and one token whose log μ is missing; the last place is padding
    old = logs([[0.4, 0.1, 0.3, 0.9]])
    rollout = logs([[0.2, 0.2, 0.3, 0.1]])
    rollout[0, 2] = -math.inf
    mask = torch.tensor([[True, True, True, False]])
    found = mismatch_tally(old, rollout, mask).finalise()
    assert found["mismatch/k1"] == pytest.approx(0.0, abs=1e-12)  # mean of −ln 2 and ln 2
    assert found["mismatch/k3"] == pytest.approx(((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 2)
    assert found["mismatch/logprob_diff_mean"] == pytest.approx(math.log(2))
    assert found["mismatch/logprob_diff_p99"] == pytest.approx(math.log(2), rel=0.037)
    assert found["mismatch/max_prob_diff"] == pytest.approx(0.2)
    assert found["mismatch/missing_tokens"] == 1.0
    assert found["mismatch/missing_fraction"] == pytest.approx(1 / 3)


def test_mismatch_signs_estimate_kl_of_the_engine_from_the_learner():
    mu, pi = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    exact = float((mu * np.log(mu / pi)).sum())
    counts = (mu * 10).astype(int)  # a sample of μ with exactly its proportions
    tokens = np.repeat(np.arange(3), counts)
    old, rollout = torch.from_numpy(np.log(pi[tokens]))[None], torch.from_numpy(np.log(mu[tokens]))[None]
    found = mismatch_tally(old, rollout, torch.ones_like(old, dtype=torch.bool)).finalise()
    assert found["mismatch/k1"] == pytest.approx(exact)
    assert found["mismatch/k3"] == pytest.approx(exact)
    assert found["mismatch/k1"] > 0.1


def test_nothing_comparable_is_absent_rather_than_zero():
    tally = mismatch_tally(torch.zeros(1, 2), torch.full((1, 2), NAN), torch.ones(1, 2, dtype=torch.bool))
    assert tally.finalise() == {"mismatch/missing_tokens": 2.0, "mismatch/missing_fraction": 1.0}
    assert Tally.empty().finalise() == {}
    assert Tally.merge_all([]).finalise() == {}


def test_correction_hand_worked():
    raw = torch.tensor([[0.5, 1.0, 4.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]])
    found = correction_tally(raw, raw.clamp(max=2.0), mask, cap=2.0).finalise()
    assert found["correction/weight_mean"] == pytest.approx(3.5 / 3)
    assert found["correction/weight_mean_raw"] == pytest.approx(5.5 / 3)
    assert found["correction/weight_max_raw"] == 4.0
    assert found["correction/capped_fraction"] == pytest.approx(1 / 3)
    assert found["correction/ess"] == pytest.approx(3.5**2 / (3 * (0.25 + 1 + 4)))
    assert found["correction/ess_raw"] == pytest.approx(5.5**2 / (3 * (0.25 + 1 + 16)))


def test_correction_bounds_follow_the_mode():
    old, rollout = logs([[0.1, 0.4, 0.4]]), logs([[0.4, 0.4, 0.1]])  # raw ¼, 1, 4
    mask = torch.ones(1, 3, dtype=torch.bool)
    raw = raw_correction(old, rollout, mask)
    weights = correction_weights(old, rollout, mask, mode="mask", floor=0.5)
    found = correction_tally(raw, weights, mask, mode="mask", cap=2.0, floor=0.5).finalise()
    assert found["correction/capped_fraction"] == pytest.approx(2 / 3)
    assert found["correction/ess"] == pytest.approx(1 / 3)  # one token of three is left
    found = correction_tally(raw, raw.clamp(max=2), mask, mode="truncate", cap=2.0, floor=0.5).finalise()
    assert found["correction/capped_fraction"] == pytest.approx(1 / 3)
    gone = correction_tally(raw, torch.zeros_like(raw), mask).finalise()
    assert gone["correction/ess"] == 0.0 == gone["correction/weight_mean"]


def test_ratio_counts_only_where_the_clip_takes_the_gradient():
    # r:      0.5   0.5   2.0   2.0   1.0   5.0 (A<0, beyond a dual clip of 3)   masked
    ratio = torch.tensor([[0.5, 0.5, 2.0, 2.0, 1.0, 5.0, 9.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0]])
    mask = torch.tensor([[True] * 6 + [False]])
    found = ratio_tally(ratio, advantages, mask, clip_low=0.2, clip_high=0.28, dual_clip=3.0).finalise()
    assert found == {
        "ratio/mean": pytest.approx(11.0 / 6),
        "ratio/max": 5.0,
        "ratio/clip_low_fraction": pytest.approx(1 / 6),
        "ratio/clip_high_fraction": pytest.approx(1 / 6),
        "ratio/dual_clip_fraction": pytest.approx(1 / 6),
    }
    by_row = ratio_tally(ratio, torch.tensor([1.0]), mask, clip_low=0.2, clip_high=0.28).finalise()
    assert by_row["ratio/clip_high_fraction"] == pytest.approx(3 / 6)
    assert by_row["ratio/clip_low_fraction"] == by_row["ratio/dual_clip_fraction"] == 0.0


def test_entropy_reference_and_loss_parts():
    mask = torch.tensor([[True, True, False]])
    assert entropy_tally(torch.tensor([[1.0, 2.0, NAN]]), mask).finalise() == {"entropy": 1.5}
    assert reference_tally(torch.tensor([[0.2, 0.4, NAN]]), mask).finalise() == {
        "kl/reference": pytest.approx(0.3, rel=1e-6)
    }
    parts = loss_tally(torch.tensor(0.5), torch.tensor(0.25), torch.tensor(-1.0))
    assert parts.merge(parts).finalise() == {"loss/policy": 1.0, "loss/kl": 0.5, "loss/entropy": -2.0}


def random_step(seed, rows=7, width=5):
    random = np.random.default_rng(seed)
    old = torch.from_numpy(-3 * random.random((rows, width)))
    rollout = old + torch.from_numpy(random.normal(0, 0.5, (rows, width)) ** 3)
    rollout[torch.from_numpy(random.random((rows, width)) < 0.1)] = NAN
    mask = torch.from_numpy(random.random((rows, width)) < 0.7)
    advantages = torch.from_numpy(random.normal(size=rows))
    entropy = torch.from_numpy(random.random((rows, width)))
    return old, rollout, mask, advantages, entropy


def tally_rows(step, rows):
    old, rollout, mask, advantages, entropy = (tensor[rows] for tensor in step)
    raw = raw_correction(old, rollout, mask)
    weights = correction_weights(old, rollout, mask)
    return Tally.merge_all(
        [
            mismatch_tally(old, rollout, mask),
            correction_tally(raw, weights, mask),
            ratio_tally(raw, advantages, mask, clip_low=0.2, clip_high=0.28),
            entropy_tally(entropy, mask),
        ]
    )


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_any_partition_merges_to_the_whole(seed, owner):
    step = random_step(seed)
    whole = tally_rows(step, list(range(7))).finalise()
    parts = [tally_rows(step, [r for r in range(7) if owner[r] == rank]) for rank in range(4)]
    # as ranks would: each sends its vector, sums are added, maxima compared
    vectors = torch.stack([part.to_vector() for part in parts])
    reduced = torch.cat([vectors[:, : Tally.sums].sum(0), vectors[:, Tally.sums :].amax(0)])
    for found in (Tally.merge_all(parts).finalise(), Tally.from_vector(reduced).finalise()):
        assert found == {name: pytest.approx(value, rel=1e-9, abs=1e-12) for name, value in whole.items()}


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6))
def test_numbers_agree_with_numpy_over_the_whole(seed):
    old, rollout, mask, _, _ = step = random_step(seed, rows=40, width=20)
    found = tally_rows(step, slice(None)).finalise()
    valid = (mask & rollout.isfinite()).numpy()
    d = (old - rollout).numpy()[valid]
    assert found["mismatch/k1"] == pytest.approx(-d.mean(), rel=1e-9, abs=1e-12)
    assert found["mismatch/k3"] == pytest.approx((np.exp(d) - 1 - d).mean(), rel=1e-9)
    p99 = np.quantile(np.abs(d), 0.99, method="inverted_cdf")
    assert p99 * 0.999 <= found["mismatch/logprob_diff_p99"] <= p99 * 1.038
    gap = (old.exp() - rollout.exp()).abs().numpy()[valid].max()
    assert found["mismatch/max_prob_diff"] == pytest.approx(gap, rel=1e-12)


def test_vector_round_trip_and_its_checks():
    tally = tally_rows(random_step(1), slice(None))
    assert tally.to_vector().shape == (Tally.size,)
    assert Tally.from_vector(tally.to_vector()).finalise() == tally.finalise()
    vector = tally.to_vector()
    vector.zero_()  # a copy: an all-reduce in place must not change the tally
    assert tally["ratio_tokens"] > 0
    received = Tally.from_vector(tally.to_vector())
    vector = tally.to_vector()
    kept = Tally.from_vector(vector)
    vector.zero_()  # and a receive buffer used again must not change what was read from it
    assert kept.finalise() == received.finalise()
    with pytest.raises(ValueError, match="a tally is float64"):
        Tally.from_vector(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="a tally is float64"):
        Tally.from_vector(torch.zeros(Tally.size))


def test_histogram_edges_and_a_broken_learner():
    found = difference_histogram(torch.tensor([0.0, 9e-7, 1.1e-6, 99.0, 101.0, math.inf, NAN]))
    assert found[0] == 2
    assert found[1] + found[2] + found[3] == 1
    assert found[BINS - 2] == 1
    assert found[BINS - 1] == 3
    assert found.sum() == 7
    zeros = torch.zeros(1, 5)
    assert mismatch_tally(zeros, zeros, zeros == 0).finalise()["mismatch/logprob_diff_p99"] == 0.0
    broken = mismatch_tally(torch.full((1, 2), NAN), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    assert math.isnan(broken.finalise()["mismatch/k1"])


def test_tallies_carry_no_graph():
    old = torch.zeros(1, 2, requires_grad=True)
    tally = mismatch_tally(old, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    assert not tally.vector.requires_grad


def test_staleness():
    first, second = Staleness.of([0, 0, 1], dropped=2), Staleness.of([3])
    assert first.merge(second).finalise() == {
        "staleness/mean": 1.0,
        "staleness/max": 3.0,
        "staleness/dropped": 2.0,
        "staleness/histogram/0": 2.0,
        "staleness/histogram/1": 1.0,
        "staleness/histogram/3": 1.0,
    }
    assert first.merge(second) == Staleness.of([3, 0, 1, 0], dropped=2)
    assert Staleness.of([], dropped=4).finalise() == {"staleness/dropped": 4.0}
    with pytest.raises(ValueError, match="newer than the learner"):
        Staleness.of([1, -1])


def test_advantage_shares():
    parts = {"a": torch.tensor([1.0, -1.0, 0.0]), "b": torch.tensor([-3.0, 3.0, 0.0]), "flat": torch.zeros(3)}
    assert advantage_shares(parts) == {
        "advantage/a/share": 0.25,
        "advantage/b/share": 0.75,
        "advantage/flat/share": 0.0,
    }
    assert advantage_shares({"a": torch.zeros(3)}) == {"advantage/a/share": 0.0}


def test_reward_statistics():
    rewards = {"x": torch.tensor([1.0, 3.0, 5.0, NAN, 7.0]), "none": torch.full((5,), NAN)}
    found = reward_statistics(rewards, torch.tensor([0, 0, 1, 1, 2]))
    assert found == {
        "reward/x/scored_fraction": 0.8,
        "reward/x/mean": 4.0,
        "reward/x/std": pytest.approx(math.sqrt(20 / 3)),
        "reward/x/group_std": pytest.approx(math.sqrt(2)),  # of 1 and 3; the others have one scored member
        "reward/none/scored_fraction": 0.0,
    }
