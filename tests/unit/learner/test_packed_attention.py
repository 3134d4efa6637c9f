"""Packed attention against one dense float64 attention with an explicit mask, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ullim.errors import BadInput
from ullim.learner import attention
from ullim.learner.attention import PackedLayout, Span, packed_attention

HEADS, KV_HEADS, DIM = 4, 2, 8


def row(*groups: tuple[int, list[int]]) -> tuple[list[Span], Tensor]:
    """Spans of (prompt tokens, completion lengths) laid end to end, and the dense mask [T, T] that they mean."""
    spans, places, total = [], [], 0
    for prompt, lengths in groups:
        prompt_places = list(range(total, total + prompt))
        places.append(prompt_places)
        start, total, starts = total, total + prompt, []
        for length in lengths:
            starts.append(total)
            places.append(prompt_places + list(range(total, total + length)))
            total += length
        spans.append(Span(start, prompt, tuple(starts), tuple(lengths)))
    distance = torch.full((total, total), -1)  # how far back a visible key is, -1 where it is not visible
    for run in places:
        for query in range(len(run)):
            for key in range(query + 1):
                distance[run[query], run[key]] = query - key
    return spans, distance


def tensors(tokens: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = [(1, HEADS, tokens, DIM), (1, KV_HEADS, tokens, DIM), (1, KV_HEADS, tokens, DIM), (1, tokens, HEADS, DIM)]
    q, k, v, grad = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad


def dense(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~allowed, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


groups = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), max_size=5)), min_size=1, max_size=4)


@given(groups, st.sampled_from([None, 1, 3]), st.integers(0, 100))
@settings(deadline=None, max_examples=50)
def test_equals_dense_attention_and_its_gradients(laid, window, seed):
    spans, distance = row(*laid)
    allowed = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    q, k, v, grad = tensors(len(distance), torch.float64, seed)
    out, weights = packed_attention(
        nn.Identity(), q, k, v, None, packed=PackedLayout.of(spans), scaling=0.3, sliding_window=window
    )
    expected = dense(q, k, v, allowed, 0.3)
    assert weights is None
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("score_bytes", [2**26, 1])
def test_half_precision_backward_by_products(score_bytes, monkeypatch):
    monkeypatch.setattr(attention, "SCORE_BYTES", score_bytes)  # 1: one completion at a time
    spans, distance = row((7, [6, 5, 1, 0]), (3, [9]))
    q, k, v, grad = tensors(len(distance), torch.bfloat16)
    out, _ = packed_attention(nn.Identity(), q, k, v, None, packed=PackedLayout.of(spans))
    ours = torch.autograd.grad(out, (q, k, v), grad)
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = dense(*leaves, distance >= 0, DIM**-0.5)
    for mine, theirs in zip(ours, torch.autograd.grad(expected, leaves, grad.double()), strict=True):
        assert mine.dtype == torch.bfloat16
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 0.01  # bfloat16 resolves 0.004


def test_completions_of_like_length_share_a_block_and_others_do_not():
    layout = PackedLayout.of([Span(0, 4, (4, 14, 23, 25), (10, 9, 2, 0))])
    assert [(b.runs, b.length, b.prefix_tokens) for b in layout.blocks] == [(1, 4, 0), (2, 10, 4), (1, 2, 4)]
    # the run of 9 repeats its last place once, and that repetition is known as padding
    assert layout.blocks[1].index.tolist() == [*range(4, 14), *range(14, 23), 22]
    assert layout.blocks[1].padding is not None
    assert layout.blocks[1].padding.tolist() == [19]
    assert layout.place.tolist() == [*range(4), *range(4, 14), *range(14, 23), 24, 25]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"packed": None}, "does not hand keyword arguments on"),
        ({"softcap": 50.0}, "uses softcap"),
        ({"s_aux": torch.zeros(HEADS)}, "uses s_aux"),
        ({"attention_mask": torch.zeros(1, 1, 2, 2)}, "uses attention_mask"),
        ({"dropout": 0.1}, "uses dropout"),
    ],
)
def test_what_the_blocks_cannot_represent_is_refused(arguments, message):
    spans, distance = row((2, []))
    q, k, v, _ = tensors(len(distance), torch.float32)
    rest = {"packed": PackedLayout.of(spans), "attention_mask": None} | arguments
    with pytest.raises(BadInput, match=message):
        packed_attention(nn.Identity(), q, k, v, **rest)
