"""Advantages against hand-worked numbers, a float64 numpy reference, and the properties of any group statistic."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullim.objective.advantages import decoupled_advantages, group_advantages, scored_members

NAN = float("nan")
quick = settings(deadline=None, max_examples=50)


def reference_group(rewards, ids, scale="group", eps=1e-4):
    """Plain float64 loops over groups, written without looking at the implementation."""
    rewards, ids = np.asarray(rewards, dtype=np.float64), np.asarray(ids)
    out = np.zeros(len(rewards))
    everyone = rewards[~np.isnan(rewards)]
    for group in set(ids.tolist()):
        members = [i for i in range(len(ids)) if ids[i] == group and not math.isnan(rewards[i])]
        values = rewards[members]
        if len(members) < 2 or len(set(values.tolist())) == 1:
            continue
        divisor = {"group": values.std(ddof=1) + eps, "batch": everyone.std(ddof=1) + eps, "none": 1.0}[scale]
        out[members] = (values - values.mean()) / divisor
    return out


def reference_gdpo(channels, ids, weights, eps=1e-4):
    lost = np.any([np.isnan(channels[c]) for c in channels], axis=0)
    parts = {c: weights[c] * reference_group(np.where(lost, NAN, channels[c]), ids, eps=eps) for c in channels}
    total = np.sum(list(parts.values()), axis=0)
    kept = total[~lost]
    return np.where(lost, 0.0, (total - kept.mean()) / (kept.std(ddof=1) + eps)), parts


@st.composite
def steps(draw, channels=1):
    """Rewards per channel and interleaved group ids; some unscored, some groups tiny or flat."""
    size = draw(st.integers(2, 24))
    ids = draw(st.lists(st.integers(-3, 4), min_size=size, max_size=size))
    value = st.one_of(st.sampled_from([0.0, 0.1, 1.0]), st.floats(-50, 50, width=32), st.just(NAN))
    return ids, [draw(st.lists(value, min_size=size, max_size=size)) for _ in range(channels)]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def test_hand_worked_group_with_an_unscored_member_and_interleaving():
    # group 7: 1, 2, 3 → mean 2, sample std 1.  group 4: 0, 4 → mean 2, std √8.
    rewards = torch.tensor([1.0, 0.0, 2.0, NAN, 4.0, 3.0])
    ids = torch.tensor([7, 4, 7, 7, 4, 7])
    expected = [-1 / 1.0001, -2 / (math.sqrt(8) + 1e-4), 0.0, 0.0, 2 / (math.sqrt(8) + 1e-4), 1 / 1.0001]
    found = group_advantages(rewards, ids)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        group_advantages(rewards, ids, scale="none"), torch.tensor([-1.0, -2.0, 0.0, 0.0, 2.0, 1.0])
    )
    # batch: rewards 1, 0, 2, 4, 3 → mean 2, sample variance (1+4+0+4+1)/4 = 2.5
    torch.testing.assert_close(
        group_advantages(rewards, ids, scale="batch"),
        torch.tensor([-1.0, -2.0, 0.0, 0.0, 2.0, 1.0]) / (math.sqrt(2.5) + 1e-4),
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@quick
@given(steps())
def test_agrees_with_the_reference(scale, step):
    ids, (rewards,) = step
    found = group_advantages(tensor(rewards), torch.tensor(ids), scale=scale)
    np.testing.assert_allclose(found.numpy(), reference_group(rewards, ids, scale), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [0.1, -1 / 3, 1e6 + 0.1])
def test_flat_group_is_exactly_zero_though_its_mean_rounds(scale, value):
    rewards = torch.tensor([value] * 7 + [0.0, 1.0])
    ids = torch.tensor([0] * 7 + [1, 1])
    found = group_advantages(rewards, ids, scale=scale)
    assert found[:7].tolist() == [0.0] * 7
    assert found[8] > 0


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_fewer_than_two_scored_members_is_exactly_zero(scale):
    found = group_advantages(
        torch.tensor([5.0, NAN, 2.0, 9.0, NAN, 1.0]), torch.tensor([0, 0, 1, 2, 3, 2]), scale=scale
    )
    assert found[[0, 1, 2, 4]].tolist() == [0.0] * 4
    assert found[3] > 0 > found[5]


def test_nobody_scored_and_nobody_there():
    assert group_advantages(torch.tensor([NAN, NAN]), torch.tensor([0, 0])).tolist() == [0.0, 0.0]
    for scale in ("group", "batch", "none"):
        assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), scale=scale).shape == (0,)


@quick
@given(steps(), st.randoms(use_true_random=False))
def test_order_and_names_of_groups_do_not_matter(step, random):
    ids, (rewards,) = step
    order = list(range(len(ids)))
    random.shuffle(order)
    renamed = {group: 1000 - 17 * place for place, group in enumerate(sorted(set(ids)))}
    found = group_advantages(tensor(rewards), torch.tensor(ids))
    shuffled = group_advantages(tensor(rewards)[order], torch.tensor([renamed[ids[i]] for i in order]))
    torch.testing.assert_close(shuffled, found[order], rtol=1e-9, atol=1e-9)


@quick
@given(steps(), st.floats(-100, 100), st.floats(0.5, 20))
def test_shift_and_scale_of_the_reward(step, shift, factor):
    ids, (rewards,) = step
    ids, base = torch.tensor(ids), tensor(rewards).mul(8).round().div(8)  # far from where eps or rounding decides
    for scale in ("group", "batch", "none"):
        plain = group_advantages(base, ids, scale=scale, eps=0.0)
        torch.testing.assert_close(
            group_advantages(base + shift, ids, scale=scale, eps=0.0), plain, rtol=1e-8, atol=1e-8
        )
        scaled = group_advantages(base * factor, ids, scale=scale, eps=0.0)
        torch.testing.assert_close(scaled, plain * factor if scale == "none" else plain, rtol=1e-8, atol=1e-8)


@quick
@given(steps())
def test_an_unscored_member_changes_nobody_else(step):
    ids, (rewards,) = step
    alone = group_advantages(tensor(rewards), torch.tensor(ids))
    joined = group_advantages(tensor([*rewards, NAN]), torch.tensor([*ids, ids[0]]))
    torch.testing.assert_close(joined[:-1], alone, rtol=1e-12, atol=1e-12)
    assert joined[-1] == 0.0


def test_half_precision_rewards_are_promoted():
    rewards = torch.tensor([1.0, 2.0, 4.0], dtype=torch.bfloat16)
    found = group_advantages(rewards, torch.zeros(3, dtype=torch.int32))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), reference_group([1.0, 2.0, 4.0], [0, 0, 0]), rtol=1e-6)


@pytest.mark.parametrize(
    ("rewards", "ids", "options", "message"),
    [
        (torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int64), {}, r"must be \[N\]"),
        (torch.zeros(3), torch.zeros(2, dtype=torch.int64), {}, r"must be \[N\]"),
        (torch.zeros(2), torch.zeros(2), {}, "group_ids int"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), {}, "must be float"),
        (torch.tensor([1.0, math.inf]), torch.zeros(2, dtype=torch.int64), {}, "infinite"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), {"scale": "std"}, "scale must be"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), {"eps": -1.0}, "eps must be"),
    ],
)
def test_bad_input_is_named(rewards, ids, options, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, ids, **options)


# GDPO


def test_gdpo_hand_worked():
    # One group of three. like: 0, 1, 2 → A = −1, 0, 1 (over 1.0001). length: 1, 1, 4 → mean 2, std √3.
    ids = torch.tensor([5, 5, 5])
    rewards = {"like": torch.tensor([0.0, 1.0, 2.0]), "length": torch.tensor([1.0, 1.0, 4.0])}
    found, parts = decoupled_advantages(rewards, ids, {"like": 1.0, "length": 0.5})
    like = np.array([-1.0, 0.0, 1.0]) / 1.0001
    length = 0.5 * np.array([-1.0, -1.0, 2.0]) / (math.sqrt(3) + 1e-4)
    np.testing.assert_allclose(parts["like"].numpy(), like, rtol=1e-6)
    np.testing.assert_allclose(parts["length"].numpy(), length, rtol=1e-6)
    total = like + length
    np.testing.assert_allclose(found.numpy(), total / (math.sqrt((total**2).sum() / 2) + 1e-4), rtol=1e-5)
    plain, _ = decoupled_advantages(rewards, ids, {"like": 1.0, "length": 0.5}, batch_normalize=False)
    np.testing.assert_allclose(plain.numpy(), total, rtol=1e-6)


@quick
@given(steps(channels=3), st.lists(st.floats(-3, 3), min_size=3, max_size=3))
def test_gdpo_agrees_with_the_reference(step, factors):
    ids, columns = step
    names = ("a", "b", "c")
    factors = [round(factor, 3) or 1.0 for factor in factors]
    weights = dict(zip(names, factors, strict=True))
    found, parts = decoupled_advantages(
        {name: tensor(column) for name, column in zip(names, columns, strict=True)}, torch.tensor(ids), weights
    )
    scored = ~np.any(np.isnan(columns), axis=0)
    if scored.sum() < 2:
        assert not found.any()
        return
    expected, expected_parts = reference_gdpo(
        {n: np.array(c) for n, c in zip(names, columns, strict=True)}, ids, weights
    )
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-8, atol=1e-8)
    for name in names:
        np.testing.assert_allclose(parts[name].numpy(), expected_parts[name], rtol=1e-9, atol=1e-9)
    assert not found[~scored].any()


@quick
@given(steps())
def test_one_channel_without_the_batch_step_is_the_group_rule(step):
    ids, (rewards,) = step
    found, parts = decoupled_advantages(
        {"only": tensor(rewards)}, torch.tensor(ids), {"only": 1.0}, batch_normalize=False
    )
    expected = group_advantages(tensor(rewards), torch.tensor(ids))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(parts["only"], expected, rtol=0, atol=0)


def test_flat_channel_contributes_exactly_nothing():
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    moving = torch.tensor([0.3, 0.1, 0.2, 0.9, 0.5, 0.7])
    flat = torch.tensor([0.1, 0.1, 0.1, 0.7, 0.7, 0.7])
    alone, _ = decoupled_advantages({"moving": moving}, ids, {"moving": 1.0})
    both, parts = decoupled_advantages({"moving": moving, "flat": flat}, ids, {"moving": 1.0, "flat": 5.0})
    assert both.tolist() == alone.tolist()
    assert parts["flat"].tolist() == [0.0] * 6


def test_tied_groups_stay_exactly_zero_after_the_batch_step():
    # group 0 flat in both; group 1 cancels (the channels disagree by the same amount); group 2 is informative, and its
    # members' sum rounds, so that the step's mean is not exactly 0 and would leak into the others.
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    first = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.2, 0.7, 0.1, 0.25, 0.9], dtype=torch.float64)
    second = torch.tensor([0.3, 0.3, 0.3, 0.9, 0.8, 0.3, 0.7, 0.1, 0.3], dtype=torch.float64)
    found, parts = decoupled_advantages({"x": first, "y": second}, ids, {"x": 1.0, "y": 1.0})
    assert parts["x"][3:6].abs().min() > 0.1
    assert found[:6].tolist() == [0.0] * 6
    assert found[6:].abs().min() > 0.01
    # Tied responses count in the step's std, as in the paper.
    total = (parts["x"] + parts["y"]).numpy()
    np.testing.assert_allclose(found[6:].numpy(), total[6:] / (total.std(ddof=1) + 1e-4), rtol=1e-9)


def test_everything_tied_gives_zeros():
    found, _ = decoupled_advantages({"x": torch.full((4,), 0.1)}, torch.tensor([0, 0, 1, 1]), {"x": 1.0})
    assert found.tolist() == [0.0] * 4


def test_gdpo_keeps_apart_what_grpo_collapses():
    """The paper's point: (1, 0) and (0, 1) sum alike, but where one channel is rare its success is worth more."""
    ids = torch.zeros(4, dtype=torch.int64)
    easy, hard = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0, 0.0])
    summed = group_advantages(easy + hard, ids)
    found, _ = decoupled_advantages({"easy": easy, "hard": hard}, ids, {"easy": 1.0, "hard": 1.0})
    assert summed[0] == summed[2]
    assert found[2] > found[0] + 0.1


def test_a_completion_that_one_channel_misses_leaves_as_a_whole():
    ids = torch.tensor([0, 0, 0, 0])
    rewards = {"x": torch.tensor([1.0, 2.0, 3.0, 100.0]), "y": torch.tensor([5.0, 1.0, 2.0, NAN])}
    found, parts = decoupled_advantages(rewards, ids, {"x": 1.0, "y": 1.0})
    without, _ = decoupled_advantages({k: v[:3] for k, v in rewards.items()}, ids[:3], {"x": 1.0, "y": 1.0})
    torch.testing.assert_close(found[:3], without)
    assert found[3] == parts["x"][3] == parts["y"][3] == 0.0
    assert scored_members(rewards, {"x": 1.0, "y": 1.0}).tolist() == [True, True, True, False]


def test_a_channel_of_weight_zero_neither_moves_nor_excludes():
    ids = torch.tensor([0, 0, 0])
    rewards = {"x": torch.tensor([1.0, 2.0, 4.0]), "logged": torch.tensor([NAN, 9.0, 0.0])}
    found, parts = decoupled_advantages(rewards, ids, {"x": 1.0, "logged": 0.0})
    alone, _ = decoupled_advantages({"x": rewards["x"]}, ids, {"x": 1.0})
    assert found.tolist() == alone.tolist()
    assert parts["logged"].tolist() == [0.0] * 3
    assert scored_members(rewards, {"x": 0.0, "logged": 0.0}).tolist() == [False] * 3


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"x": 1.0, "lenght": 1.0}, r"unknown channels \['lenght'\]"),
        ({}, r"channels \['x'\] have no weight"),
        ({"x": NAN}, "must be finite"),
    ],
)
def test_weights_that_do_not_fit_are_an_error(weights, message):
    with pytest.raises(ValueError, match=message):
        decoupled_advantages({"x": torch.zeros(2)}, torch.zeros(2, dtype=torch.int64), weights)


def test_no_channel_is_an_error():
    with pytest.raises(ValueError, match="no channel"):
        decoupled_advantages({}, torch.zeros(2, dtype=torch.int64), {})
