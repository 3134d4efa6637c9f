"""Clip-Cov and KL-Cov: the covariance by hand, who is chosen, and what being chosen does."""

import math

import numpy as np
import pytest
import torch

from ullim.objective.losses import clip_cov, clip_cov_tokens, kl_cov, kl_cov_tokens, token_covariance

NAN = float("nan")


def example(rows=6, width=50, seed=3):
    generator = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(rows, width, generator=generator)
    advantages = torch.randn(rows, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.8
    return logp, advantages, mask


def test_covariance_hand_worked():
    # logp: −1, −3 | −2 → mean −2;  A: 3, 3 | −3 → mean 1 over the three tokens
    logp = torch.tensor([[-1.0, -3.0], [-2.0, NAN]])
    mask = torch.tensor([[True, True], [True, False]])
    found = token_covariance(logp, torch.tensor([3.0, -3.0]), mask)
    assert found.tolist() == [[2.0, -2.0], [0.0, 0.0]]
    per_token = torch.tensor([[3.0, 3.0], [-3.0, NAN]])
    assert token_covariance(logp, per_token, mask).tolist() == found.tolist()


def test_covariance_agrees_with_numpy_and_sums_to_the_covariance():
    logp, advantages, mask = example()
    x = logp[mask].double().numpy()
    a = advantages[:, None].expand_as(logp)[mask].double().numpy()
    found = token_covariance(logp, advantages, mask)[mask].numpy()
    np.testing.assert_allclose(found, (x - x.mean()) * (a - a.mean()), rtol=1e-9)
    assert found.mean() == pytest.approx(np.cov(x, a, bias=True)[0, 1])


def test_clip_cov_chooses_the_quota_from_the_band_and_repeats_by_seed():
    logp, advantages, mask = example()
    covariance = token_covariance(logp, advantages, mask)
    options = {"fraction": 0.05, "low": 0.2, "high": 2.0}
    first = clip_cov_tokens(logp, advantages, mask, **options, generator=torch.Generator().manual_seed(1))
    again = clip_cov_tokens(logp, advantages, mask, **options, generator=torch.Generator().manual_seed(1))
    other = clip_cov_tokens(logp, advantages, mask, **options, generator=torch.Generator().manual_seed(2))
    assert int(first.sum()) == int(0.05 * int(mask.sum())) > 5
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert mask[first].all()
    assert covariance[first].min() >= 0.2
    assert covariance[first].max() <= 2.0


def test_clip_cov_takes_what_there_is_and_nothing_of_an_empty_band():
    logp, advantages, mask = example()
    generator = torch.Generator().manual_seed(0)
    band = mask & (token_covariance(logp, advantages, mask) >= 0.5)
    everyone = clip_cov_tokens(logp, advantages, mask, fraction=1.0, low=0.5, high=1e9, generator=generator)
    assert torch.equal(everyone, band)
    assert not clip_cov_tokens(logp, advantages, mask, low=1e6, high=1e9, generator=generator).any()
    assert not clip_cov_tokens(logp, advantages, torch.zeros_like(mask), generator=generator).any()


def test_kl_cov_chooses_the_largest_covariances():
    logp, advantages, mask = example()
    chosen = kl_cov_tokens(logp, advantages, mask, fraction=0.1)
    covariance = token_covariance(logp, advantages, mask)
    assert int(chosen.sum()) == int(0.1 * int(mask.sum()))
    assert covariance[chosen].min() >= covariance[mask & ~chosen].max()
    assert mask[chosen].all()
    everyone = kl_cov_tokens(logp, advantages, mask, fraction=1.0)
    assert torch.equal(everyone, mask)


def test_clip_cov_takes_value_and_gradient_of_the_chosen_only():
    loss = torch.tensor([[1.0, 2.0, NAN]], requires_grad=True)
    found = clip_cov(loss, torch.tensor([[False, False, True]]))
    found.sum().backward()
    assert found.tolist() == [[1.0, 2.0, 0.0]]
    assert loss.grad.tolist() == [[1.0, 1.0, 0.0]]


def test_kl_cov_adds_the_kl_of_the_chosen_only():
    # r = 2: k3 = 2 − 1 − ln 2, slope by log π is r − 1 = 1
    logp = torch.tensor([[math.log(0.4), math.log(0.4), NAN]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[math.log(0.2), math.log(0.2), 0.0]], dtype=torch.float64)
    loss = torch.tensor([[5.0, 5.0, 5.0]], dtype=torch.float64)
    found = kl_cov(loss, torch.tensor([[True, False, False]]), logp, old, coefficient=3.0)
    np.testing.assert_allclose(found.detach().numpy(), [[5 + 3 * (1 - math.log(2)), 5, 5]], rtol=1e-12)
    found.sum().backward()
    np.testing.assert_allclose(logp.grad.numpy(), [[3.0, 0.0, 0.0]], rtol=1e-12)


def test_kl_cov_penalty_is_the_kl_named():
    """Expectations of the penalty and its gradient under the old policy: KL(π_old ‖ π_θ) and its gradient."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    old = torch.log_softmax(torch.tensor([0.1, 0.5, -0.4], dtype=torch.float64), -1)
    logp = torch.log_softmax(logits, -1)
    exact = (old.exp() * (old - logp)).sum()
    everyone = torch.ones(3, dtype=torch.bool)
    found = (old.exp() * kl_cov(torch.zeros(3, dtype=torch.float64), everyone, logp, old)).sum()
    assert found.item() == pytest.approx(exact.item(), rel=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(found, logits, retain_graph=True), torch.autograd.grad(exact, logits)
    )


def test_bad_quota_or_band_is_named():
    logp, advantages, mask = example(2, 3)
    with pytest.raises(ValueError, match="fraction must lie"):
        kl_cov_tokens(logp, advantages, mask, fraction=1.5)
    with pytest.raises(ValueError, match="low must not exceed"):
        clip_cov_tokens(logp, advantages, mask, low=2.0, high=1.0, generator=torch.Generator())
