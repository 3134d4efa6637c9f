"""Ratios and correction weights: hand-worked values, numerics, and proof that masked places do not exist."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullim.objective.importance import correction_weights, invalid_rollout, policy_ratio, raw_correction

LEVELS = ("token", "sequence", "sequence_token")
POISON = (float("nan"), float("inf"), -float("inf"), 1e30)
LN2, LN4 = math.log(2), math.log(4)


def logs(rows):
    return torch.log(torch.tensor(rows, dtype=torch.float64))


# two rows; the last place of the second is padding. Ratios: 2, 1/2, 4 | 1/4, 1
LOGP = logs([[0.4, 0.1, 0.8], [0.1, 0.5, 0.9]])
OLD = logs([[0.2, 0.2, 0.2], [0.4, 0.5, 0.1]])
MASK = torch.tensor([[True, True, True], [True, True, False]])
GEOMETRIC = (4 ** (1 / 3), 0.5)  # cube root of 2·½·4, square root of ¼·1


def test_ratio_by_level_hand_worked():
    np.testing.assert_allclose(policy_ratio(LOGP, OLD, MASK).numpy(), [[2, 0.5, 4], [0.25, 1, 0]], rtol=1e-12)
    for level in ("sequence", "sequence_token"):
        found = policy_ratio(LOGP, OLD, MASK, level=level)
        np.testing.assert_allclose(found.numpy(), [[GEOMETRIC[0]] * 3, [GEOMETRIC[1]] * 2 + [0]], rtol=1e-12)


def test_ratio_gradients_hand_worked():
    """Σ c·r by logp: token r_t·c_t; sequence s·Σc/n for every token; sequence_token s·c_t, its own place only."""
    cotangent = torch.tensor([[1.0, 2.0, 3.0], [1.0, -4.0, 7.0]], dtype=torch.float64)
    expected = {
        "token": [[2 * 1, 0.5 * 2, 4 * 3], [0.25, -4, 0]],
        "sequence": [[GEOMETRIC[0] * 6 / 3] * 3, [GEOMETRIC[1] * -3 / 2] * 2 + [0]],
        "sequence_token": [[GEOMETRIC[0] * c for c in (1, 2, 3)], [GEOMETRIC[1], GEOMETRIC[1] * -4, 0]],
    }
    for level in LEVELS:
        logp = LOGP.clone().requires_grad_()
        (policy_ratio(logp, OLD, MASK, level=level) * cotangent).sum().backward()
        np.testing.assert_allclose(logp.grad.numpy(), expected[level], rtol=1e-12, err_msg=level)


def test_no_gradient_reaches_the_old_policy():
    for level in LEVELS:
        old = OLD.clone().requires_grad_()
        found = policy_ratio(LOGP.clone().requires_grad_(), old, MASK, level=level)
        found.sum().backward()
        assert old.grad is None


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("poison", POISON)
def test_masked_places_change_nothing_forward_or_backward(level, poison):
    results = []
    for value in (0.0, poison):
        logp, old = LOGP.clone(), OLD.clone()
        logp[1, 2] = value
        old[1, 2] = value
        logp.requires_grad_()
        ratio = policy_ratio(logp, old, MASK, level=level)
        ratio.sum().backward()
        results.append((ratio.detach(), logp.grad))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=0)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=0, atol=0)
    assert results[1][0][1, 2] == 0.0 == results[1][1][1, 2]


@pytest.mark.parametrize("level", LEVELS)
def test_fully_masked_row_and_extreme_ratios_stay_finite(level):
    logp = torch.tensor([[0.0, 0.0], [-1.0, 500.0], [-500.0, -500.0]], requires_grad=True)
    mask = torch.tensor([[False, False], [True, True], [True, True]])
    found = policy_ratio(logp, torch.zeros(3, 2), mask, level=level)
    found.sum().backward()
    assert found[0].tolist() == [0.0, 0.0]
    assert found.isfinite().all()
    assert found.max() <= math.exp(20) * 1.001
    assert found[2].min() >= math.exp(-20) * 0.999
    assert logp.grad.isfinite().all()


def test_a_broken_learner_is_not_hidden():
    logp = LOGP.clone()
    logp[0, 0] = float("nan")
    assert policy_ratio(logp, OLD, MASK)[0, 0].isnan()
    assert correction_weights(logp, OLD, MASK)[0, 0].isnan()
    assert correction_weights(logp, OLD, MASK, mode="mask", floor=0.5)[0, 0].isnan()


def test_half_precision_is_promoted():
    assert policy_ratio(LOGP.bfloat16(), OLD.bfloat16(), MASK).dtype == torch.float32
    assert correction_weights(LOGP.bfloat16(), OLD.bfloat16(), MASK).dtype == torch.float32


# correction weights: π_old is LOGP here and μ is OLD, so the raw weights are those ratios


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[2, 0.5, 2], [0.25, 1, 0]]),
        ({"cap": 3.0}, [[2, 0.5, 3], [0.25, 1, 0]]),
        ({"mode": "none"}, [[1, 1, 1], [1, 1, 0]]),
        ({"mode": "mask"}, [[2, 0.5, 0], [0.25, 1, 0]]),
        ({"mode": "mask", "floor": 0.5}, [[2, 0.5, 0], [0, 1, 0]]),
        ({"level": "sequence", "cap": 3.0}, [[3, 3, 3], [0.25, 0.25, 0]]),
        ({"level": "sequence", "mode": "mask", "cap": 5.0, "floor": 0.3}, [[4, 4, 4], [0, 0, 0]]),
        ({"level": "geometric", "mode": "mask"}, [[GEOMETRIC[0]] * 3, [0.5, 0.5, 0]]),
        ({"level": "geometric", "mode": "mask", "cap": 1.5, "floor": 0.1}, [[0, 0, 0], [0.5, 0.5, 0]]),
    ],
)
def test_weights_hand_worked(options, expected):
    np.testing.assert_allclose(correction_weights(LOGP, OLD, MASK, **options).numpy(), expected, rtol=1e-12)


def test_bounds_are_inclusive():
    raw = torch.tensor([[0.5, 2.0]], dtype=torch.float64)
    found = correction_weights(
        raw.log(), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), mode="mask", floor=0.25
    )
    assert found.min() > 0
    exact = correction_weights(
        torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), mode="mask", cap=1.0, floor=1.0
    )
    assert exact.item() == 1.0


def test_raw_weights_are_those_before_the_cap():
    np.testing.assert_allclose(raw_correction(LOGP, OLD, MASK).numpy(), [[2, 0.5, 4], [0.25, 1, 0]], rtol=1e-12)
    np.testing.assert_allclose(raw_correction(LOGP, OLD, MASK, level="sequence").numpy(), [[4] * 3, [0.25, 0.25, 0]])


@pytest.mark.parametrize("missing", [float("nan"), -float("inf"), float("inf")])
def test_a_missing_rollout_logprob_weighs_one_and_is_counted(missing):
    rollout = OLD.clone()
    rollout[0, 2] = missing
    rollout[1, 2] = missing  # masked: neither counted nor weighed
    assert invalid_rollout(rollout, MASK).tolist() == [[False, False, True], [False, False, False]]
    np.testing.assert_allclose(correction_weights(LOGP, rollout, MASK).numpy(), [[2, 0.5, 1], [0.25, 1, 0]])
    # No factor in a product, no member of a mean: row 0 has 2 and ½ left.
    for level in ("sequence", "geometric"):
        found = correction_weights(LOGP, rollout, MASK, mode="mask", level=level, cap=1.5, floor=0.3)
        np.testing.assert_allclose(found[0].numpy(), [1, 1, 1])
    # A bound that 1 itself would fail does not take a token that could not be tested.
    strict = correction_weights(LOGP, rollout, MASK, mode="mask", cap=0.9)
    np.testing.assert_allclose(strict.numpy(), [[0, 0.5, 1], [0.25, 0, 0]])
    everything = torch.full_like(OLD, missing)
    for level in ("token", "sequence", "geometric"):
        np.testing.assert_allclose(raw_correction(LOGP, everything, MASK, level=level).numpy(), MASK.double().numpy())


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_are_detached_and_masked_places_change_nothing(poison, level):
    old, rollout = LOGP.clone(), OLD.clone()
    old[1, 2] = rollout[1, 2] = poison
    found = correction_weights(old.requires_grad_(), rollout.requires_grad_(), MASK, mode="mask", level=level)
    assert not found.requires_grad
    torch.testing.assert_close(found, correction_weights(LOGP, OLD, MASK, mode="mask", level=level), rtol=0, atol=0)


def test_extreme_weights_are_clamped_before_exp():
    old = torch.tensor([[0.0, -1e4], [50.0, 50.0]])
    rollout = torch.tensor([[-1e4, 0.0], [-50.0, -50.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    for level in ("token", "sequence", "geometric"):
        assert raw_correction(old, rollout, mask, level=level).isfinite().all()
    np.testing.assert_allclose(raw_correction(old, rollout, mask)[0], [math.exp(20), math.exp(-20)], rtol=1e-5)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 10**6))
def test_levels_agree_with_a_loop(rows, width, seed):
    random = np.random.default_rng(seed)
    old, rollout = -3 * random.random((rows, width)), -3 * random.random((rows, width))
    mask = random.random((rows, width)) < 0.7
    rollout[random.random((rows, width)) < 0.2] = np.nan
    found = {
        level: raw_correction(*map(torch.from_numpy, (old, rollout, mask)), level=level).numpy()
        for level in ("token", "sequence", "geometric")
    }
    for row in range(rows):
        logs = [old[row, t] - rollout[row, t] if np.isfinite(rollout[row, t]) else None for t in range(width)]
        valid = [log for t, log in enumerate(logs) if mask[row, t] and log is not None]
        product, mean = math.exp(sum(valid)), math.exp(sum(valid) / max(len(valid), 1))
        for t in range(width):
            token = math.exp(logs[t]) if logs[t] is not None else 1.0
            expected = (token, product, mean) if mask[row, t] else (0, 0, 0)
            got = (found["token"][row, t], found["sequence"][row, t], found["geometric"][row, t])
            np.testing.assert_allclose(got, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "geometric"}, "mode='mask' only"),
        ({"level": "geometric", "mode": "none"}, "mode='mask' only"),
        ({"mode": "clip"}, "mode must be"),
        ({"level": "row"}, "level must be"),
        ({"cap": 0.0}, "cap must be positive"),
        ({"cap": math.inf}, "cap must be positive"),
        ({"floor": 0.5}, "no meaning in mode='truncate'"),
        ({"mode": "mask", "floor": 3.0}, "floor must lie in"),
    ],
)
def test_contradictory_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        correction_weights(LOGP, OLD, MASK, **options)


def test_wrong_shapes_masks_and_levels_are_named():
    with pytest.raises(ValueError, match=r"old_logp \(2, 2\)"):
        policy_ratio(LOGP, OLD[:, :2], MASK)
    with pytest.raises(ValueError, match="mask must be a bool"):
        policy_ratio(LOGP, OLD, MASK.float())
    with pytest.raises(ValueError, match="level must be"):
        policy_ratio(LOGP, OLD, MASK, level="geometric")
    with pytest.raises(ValueError, match="level must be"):
        raw_correction(LOGP, OLD, MASK, level="sequence_token")
