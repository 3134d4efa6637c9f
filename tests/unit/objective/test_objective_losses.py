"""Loss terms and their aggregation against hand-worked numbers, plus the invariance that cutting a batch must keep."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullim.objective.losses import aggregate, clipped_surrogate, kl_estimate, overlong_penalty

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def test_clipped_surrogate_hand_worked():
    # r:            0.5   1.0   2.0
    # A = +2: min(rA, clip·A) = 1, 2, 2.56;  A = −2: min = −1.6, −2, −4
    ratio = torch.tensor([[0.5, 1.0, 2.0], [0.5, 1.0, 2.0]], dtype=torch.float64)
    found = clipped_surrogate(ratio, torch.tensor([2.0, -2.0]), **CLIP)
    np.testing.assert_allclose(found.numpy(), [[-1.0, -2.0, -2.56], [1.6, 2.0, 4.0]], rtol=1e-12)
    per_token = torch.tensor([[2.0, 2.0, -2.0], [-2.0, 0.0, 2.0]])
    found = clipped_surrogate(ratio, per_token, **CLIP)
    np.testing.assert_allclose(found.numpy(), [[-1.0, -2.0, 4.0], [1.6, 0.0, -2.56]], rtol=1e-12)


def test_the_gradient_stops_exactly_where_the_clip_holds():
    ratio = torch.tensor([[0.5, 1.1, 2.0]] * 2, requires_grad=True)
    clipped_surrogate(ratio, torch.tensor([3.0, -3.0]), **CLIP).sum().backward()
    assert ratio.grad.tolist() == [[-3.0, -3.0, 0.0], [0.0, 3.0, 3.0]]


def test_dual_clip_bounds_bad_answers_only():
    ratio = torch.tensor([[0.5, 2.0, 10.0], [0.5, 2.0, 10.0]], requires_grad=True)
    found = clipped_surrogate(ratio, torch.tensor([1.0, -1.0]), **CLIP, dual_clip=3.0)
    np.testing.assert_allclose(found.detach().numpy(), [[-0.5, -1.28, -1.28], [0.8, 2.0, 3.0]], rtol=1e-6)
    found.sum().backward()
    assert ratio.grad.tolist() == [[-1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


def test_advantages_get_no_gradient_and_must_fit():
    ratio, advantages = torch.ones(2, 3, requires_grad=True), torch.ones(2, requires_grad=True)
    clipped_surrogate(ratio, advantages, **CLIP).sum().backward()
    assert advantages.grad is None
    with pytest.raises(ValueError, match=r"advantages must be \[B\] or \[B, T\]"):
        clipped_surrogate(ratio, torch.ones(3), **CLIP)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": -0.1, "clip_high": 0.2}, "clip_low"),
        ({"clip_low": 1.2, "clip_high": 0.2}, "clip_low"),
        ({"clip_low": 0.2, "clip_high": -0.2}, "clip_high"),
        ({"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.0}, "dual_clip"),
    ],
)
def test_clip_widths_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        clipped_surrogate(torch.ones(1, 1), torch.ones(1), **options)


# aggregation

LOSS = torch.tensor([[1.0, 2.0, 6.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 13 / 4),
        ({"mode": "token-mean", "denominator": 10}, 1.3),
        ({"mode": "sequence-mean"}, (3 + 4) / 2),
        ({"mode": "sequence-mean", "denominator": 4}, 7 / 4),
        ({"mode": "constant", "denominator": 3 * 8}, 13 / 24),
        ({"mode": "constant", "denominator": torch.tensor(26.0)}, 0.5),
    ],
)
def test_aggregation_hand_worked(options, expected):
    assert aggregate(LOSS, MASK, **options).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean", "constant"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_masked_places_and_their_gradients_are_zero(mode, poison):
    loss = LOSS.clone()
    loss[~MASK] = poison
    loss.requires_grad_()
    found = aggregate(loss, MASK, mode=mode, denominator=4)
    found.backward()
    assert found.item() == aggregate(LOSS, MASK, mode=mode, denominator=4).item()
    assert loss.grad[~MASK].tolist() == [0.0] * 5
    assert (loss.grad[MASK] > 0).all()


@pytest.mark.parametrize(
    ("mode", "denominator"),
    [
        (mode, d)
        for mode in ("token-mean", "sequence-mean", "constant")
        for d in (None, 0, 7)
        if (mode, d) != ("constant", None)
    ],
)
def test_nothing_unmasked_is_exactly_zero_with_a_zero_gradient(mode, denominator):
    loss = torch.full((2, 3), float("nan"), requires_grad=True)
    found = aggregate(loss, torch.zeros(2, 3, dtype=torch.bool), mode=mode, denominator=denominator)
    found.backward()
    assert found.item() == 0.0
    assert loss.grad.tolist() == [[0.0] * 3] * 2


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 8),
    st.integers(0, 10**6),
    st.sampled_from(["token-mean", "sequence-mean", "constant"]),
    st.lists(st.integers(0, 8), max_size=4),
)
def test_any_cut_of_the_rows_adds_up_to_the_whole(rows, seed, mode, cuts):
    generator = torch.Generator().manual_seed(seed)
    loss = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, 5, generator=generator) < 0.6
    denominator = {
        "token-mean": int(mask.sum()),
        "sequence-mean": int(mask.any(dim=-1).sum()),
        "constant": rows * 5,
    }[mode]
    whole, cut = loss.clone().requires_grad_(), loss.clone().requires_grad_()
    total = aggregate(whole, mask, mode=mode, denominator=denominator)
    total.backward()
    edges = [0, *sorted(min(c, rows) for c in cuts), rows]
    summed = sum(
        aggregate(cut[a:b], mask[a:b], mode=mode, denominator=denominator) for a, b in itertools.pairwise(edges)
    )
    summed.backward()
    torch.testing.assert_close(summed, total, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(cut.grad, whole.grad, rtol=1e-12, atol=1e-12)


def test_aggregation_errors_are_named():
    with pytest.raises(ValueError, match="needs denominator"):
        aggregate(LOSS, MASK, mode="constant")
    with pytest.raises(ValueError, match="mode must be"):
        aggregate(LOSS, MASK, mode="mean")
    for denominator in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="must be positive"):
            aggregate(LOSS, MASK, denominator=denominator)
    with pytest.raises(ValueError, match="mask must be a bool"):
        aggregate(LOSS, MASK.long())


# KL


def test_kl_hand_worked_with_gradients():
    # π = ½, ref = ¼: d = ln ref − ln π = −ln 2
    logp = torch.tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([math.log(0.25)], dtype=torch.float64, requires_grad=True)
    expected = {"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": 0.5 - 1 + math.log(2)}
    slopes = {"k1": 1.0, "k2": math.log(2), "k3": 1 - 0.5}
    for kind, value in expected.items():
        found = kl_estimate(logp, ref, kind=kind)
        assert found.item() == pytest.approx(value, rel=1e-12)
        assert torch.autograd.grad(found, logp)[0].item() == pytest.approx(slopes[kind], rel=1e-12)
        assert not torch.autograd.grad(kl_estimate(logp, ref, kind=kind), ref, allow_unused=True)[0]


def test_k1_and_k3_are_unbiased_and_k2_has_the_gradient_of_the_kl():
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.1, 0.5, -0.4], dtype=torch.float64), -1)
    logp = torch.log_softmax(logits, -1)
    exact = (logp.exp() * (logp - ref)).sum()
    weights = logp.exp().detach()  # the expectation over samples of π, taken exactly
    for kind in ("k1", "k3"):
        assert (weights * kl_estimate(logp, ref, kind=kind)).sum().item() == pytest.approx(exact.item(), rel=1e-9)
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (found,) = torch.autograd.grad((weights * kl_estimate(logp, ref, kind="k2")).sum(), logits, retain_graph=True)
    torch.testing.assert_close(found, expected)
    (nothing,) = torch.autograd.grad((weights * kl_estimate(logp, ref, kind="k1")).sum(), logits)
    torch.testing.assert_close(nothing, torch.zeros(3, dtype=torch.float64))


def test_k3_is_never_negative_even_for_tiny_differences_and_stays_finite_for_huge_ones():
    logp = torch.linspace(-2.0, -1.0, 1001).requires_grad_()
    tiny = kl_estimate(logp, logp.detach() + 1e-5, kind="k3")
    assert (tiny >= 0).all()
    np.testing.assert_allclose(tiny.detach().numpy(), 5e-11, rtol=0.1)
    huge = kl_estimate(torch.tensor([-500.0, 0.0]), torch.tensor([0.0, -500.0]), kind="k3")
    assert huge.isfinite().all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_with_a_mask_lets_nothing_of_masked_places_through(kind):
    logp = torch.tensor([-1.0, float("nan"), float("inf")], requires_grad=True)
    ref = torch.tensor([-2.0, -1.0, float("nan")])
    found = kl_estimate(logp, ref, kind=kind, mask=torch.tensor([True, False, False]))
    found.sum().backward()
    assert found[1:].tolist() == [0.0, 0.0]
    assert logp.grad[1:].tolist() == [0.0, 0.0]
    assert found[0].item() == pytest.approx(kl_estimate(logp[:1], ref[:1], kind=kind).item())


def test_unknown_kl_is_named():
    with pytest.raises(ValueError, match="kind must be"):
        kl_estimate(torch.zeros(1), torch.zeros(1), kind="k4")


# overlong penalty


def test_overlong_penalty_hand_worked():
    lengths = torch.tensor([0, 80, 81, 90, 99, 100, 101, 1000])
    found = overlong_penalty(lengths, limit=100, buffer=20)
    np.testing.assert_allclose(found.numpy(), [0, 0, -0.05, -0.5, -0.95, -1, -1, -1], rtol=1e-6)
    assert found.dtype == torch.float32
    assert overlong_penalty(lengths, limit=100, buffer=0).tolist() == [0, 0, 0, 0, 0, 0, -1, -1]
    assert overlong_penalty(torch.tensor([2**25 + 1]), limit=2**25, buffer=0).item() == -1.0


@pytest.mark.parametrize("options", [{"limit": 0, "buffer": 0}, {"limit": 5, "buffer": 6}, {"limit": 5, "buffer": -1}])
def test_overlong_penalty_bounds_are_checked(options):
    with pytest.raises(ValueError, match="need limit > 0"):
        overlong_penalty(torch.tensor([1]), **options)
