"""Sampling: exact log-probs, draws that follow the distribution, numbers that depend on their key alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullim.engines.sampler import Sampler, keyed_uniforms
from ullim.errors import RunFailed


def draw(logits: torch.Tensor, temperature: float, uniforms: list[float]) -> tuple[list[int], list[float]]:
    temperatures = np.full(len(logits), temperature, dtype=np.float32)
    tokens, logprobs = Sampler().draw(logits, temperatures, np.array(uniforms, dtype=np.float64))
    return tokens.tolist(), logprobs.tolist()


def test_the_uniform_number_cuts_the_cumulative_distribution() -> None:
    # Probabilities 0.1, 0.2, 0.3, 0.4: cuts at 0.1, 0.3, 0.6.
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().repeat(6, 1)
    tokens, logprobs = draw(logits, 1.0, [0.0, 0.09, 0.11, 0.31, 0.59, 0.999999])
    assert tokens == [0, 0, 1, 2, 2, 3]
    np.testing.assert_allclose(np.exp(logprobs), [0.1, 0.1, 0.2, 0.3, 0.3, 0.4], rtol=1e-6)


def test_temperature_changes_the_distribution_and_its_logprobs() -> None:
    # Squares of 1, 2, 3 at temperature 1/2: 1/14, 4/14, 9/14.
    logits = torch.tensor([[1.0, 2.0, 3.0]]).log()
    for uniform, token in ((0.05, 0), (0.3, 1), (0.4, 2)):
        tokens, logprobs = draw(logits, 0.5, [uniform])
        assert tokens == [token]
        assert np.exp(logprobs[0]) == pytest.approx((token + 1) ** 2 / 14, rel=1e-5)


def test_temperature_zero_is_greedy_with_untempered_logprobs_beside_other_rows() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3], [0.2, 0.5, 0.3]]).log()
    tokens, logprobs = Sampler().draw(logits, np.array([0.0, 1.0], dtype=np.float32), np.array([0.99, 0.99]))
    assert tokens.tolist() == [1, 2]
    np.testing.assert_allclose(logprobs.exp(), [0.5, 0.3], rtol=1e-6)


@settings(deadline=None, max_examples=40)
@given(
    vocabulary=st.sampled_from([1, 2, 255, 256, 257, 1000]),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.1, 5.0, 200.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    half=st.booleans(),
)
def test_logprobs_equal_log_softmax(vocabulary: int, seed: int, spread: float, temperature: float, half: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(5, vocabulary, generator=generator)
    logits = logits.bfloat16() if half else logits
    edges = [0.0, 2.0**-53, 0.5, 1 - 2.0**-53, float(torch.rand(1, generator=generator))]
    tokens, logprobs = draw(logits, temperature, edges)
    assert max(tokens) < vocabulary
    expected = torch.log_softmax(logits.double() / temperature, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    # A token of weight zero in float32 must never be drawn, at the very ends of the interval either.
    assert expected.min() > -104
    np.testing.assert_allclose(logprobs, expected, rtol=1e-4, atol=2e-5)


def test_draws_follow_a_distribution_wider_than_one_block() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(700, generator=generator)
    count = 40_000
    uniforms = keyed_uniforms([9] * count, range(count), [0] * count)
    sampler, counts = Sampler(), np.zeros(700)
    for start in range(0, count, 2000):
        tokens, _ = sampler.draw(logits.expand(2000, -1), np.ones(2000, np.float32), uniforms[start : start + 2000])
        counts += np.bincount(tokens.numpy(), minlength=700)
    expected = count * torch.softmax(logits.double(), -1).numpy()
    usual = expected >= 5
    statistic = (((counts - expected) ** 2) / expected)[usual].sum()
    assert statistic < usual.sum() + 5 * np.sqrt(2 * usual.sum())


def test_non_finite_logits_raise() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(RunFailed, match="non-finite"):
            draw(torch.tensor([[0.0, bad, 1.0]]), 1.0, [0.5])
    # Minus infinity is a legal way to forbid a token.
    assert draw(torch.tensor([[0.0, float("-inf")]]), 1.0, [0.999])[0] == [0]


def test_a_buffer_of_an_earlier_larger_vocabulary_leaves_no_trace() -> None:
    sampler = Sampler()
    ones = np.ones(2, dtype=np.float32)
    sampler.draw(torch.full((2, 600), 9.0), ones, np.array([0.5, 0.999]))
    tokens, logprobs = sampler.draw(torch.zeros(2, 300), ones, np.array([0.5, 0.9999999]))
    assert tokens.tolist() == [150, 299]
    np.testing.assert_allclose(logprobs, -np.log(300), rtol=1e-5)


def test_uniforms_depend_on_every_part_of_the_key_and_on_nothing_else() -> None:
    one = keyed_uniforms([7, 7, 7, 8], [0, 0, 1, 0], [0, 1, 0, 0])
    assert len(set(one.tolist())) == 4
    assert keyed_uniforms([3, 7], [5, 0], [2, 1])[1] == one[1]
    assert keyed_uniforms([-1], [0], [0])[0] == keyed_uniforms([2**64 - 1], [0], [0])[0]


def test_uniforms_are_uniform_along_each_part_of_the_key() -> None:
    count = 20_000
    for key in (
        (range(count), [0] * count, [0] * count),
        ([1] * count, range(count), [0] * count),
        ([1] * count, [3] * count, range(count)),
    ):
        uniforms = keyed_uniforms(*key)
        assert uniforms.min() >= 0
        assert uniforms.max() < 1
        counts = np.histogram(uniforms, bins=100, range=(0, 1))[0]
        assert ((counts - count / 100) ** 2 / (count / 100)).sum() < 99 + 5 * np.sqrt(2 * 99)
        assert abs(np.corrcoef(uniforms[:-1], uniforms[1:])[0, 1]) < 0.03
