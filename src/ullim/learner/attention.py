"""Attention over a packed row: each prompt causally, each completion over its prompt and itself.

No [T, T] mask exists. A row is a list of *blocks*, each a small dense attention: a prompt over itself, or some
completions of one prompt, side by side, over [prompt | own tokens]. The work is therefore that of the pairs that really
attend. `packed_attention` is registered with transformers under `PACKED`; the layout reaches it as keyword argument
`packed` of the model's forward, which Hugging Face models hand on to their attention.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import AttentionInterface

from ullim.errors import BadInput

PACKED = "ullim_packed"

LEAST_FILL = 0.7
"""Completions of one prompt are padded to a common length within a block; one shorter than this share of the longest
starts a block of its own, so that padding stays below the cost of one more kernel call."""

SCORE_BYTES = 64 * 2**20
"""Upper bound for the attention scores that the CPU's backward pass holds at once."""


@dataclass(frozen=True, slots=True)
class Span:
    """Places of one prompt and its completions in the row, in tokens that are present; a completion may have none."""

    prompt_start: int
    prompt_tokens: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """`index` [n, L] are the places of n runs of tokens, each causal in itself, all of them seeing the prefix in full.

    A run shorter than L repeats its last place; such padding stands behind every real token of its run, so causality
    hides it, and what it computes is thrown away.
    """

    index: Tensor  # int64 [n * L], flat
    runs: int
    length: int
    prefix_start: int
    prefix_tokens: int
    padding: Tensor | None  # int64, flat places in [n * L] that are padding

    def allowed(self, window: int | None) -> Tensor:
        """bool [L, prefix + L]: key at most `window` - 1 places back and never ahead."""
        device = self.index.device
        query = torch.arange(self.length, device=device)[:, None] + self.prefix_tokens
        distance = query - torch.arange(self.prefix_tokens + self.length, device=device)
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Blocks of a row of T tokens. `place` [T] says where each token stands in the blocks' runs laid end to end."""

    blocks: tuple[Block, ...]
    place: Tensor  # int64 [T]
    _masks: dict[tuple[int | None, torch.dtype], list[Tensor | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, spans: SequenceOf[Span], device: torch.device | str = "cpu") -> "PackedLayout":
        """The layout of prompts and completions that fill a row without gaps."""
        runs: list[tuple[list[tuple[int, int]], int, int]] = []  # (start, length) of each run, then the prefix
        for span in spans:
            runs.append(([(span.prompt_start, span.prompt_tokens)], 0, 0))
            waiting = sorted(zip(span.starts, span.lengths, strict=True), key=lambda run: (-run[1], run[0]))
            current: list[tuple[int, int]] = []
            for run in waiting:
                if run[1] == 0:
                    continue
                if current and run[1] < LEAST_FILL * current[0][1]:
                    runs.append((current, span.prompt_start, span.prompt_tokens))
                    current = []
                current.append(run)
            if current:
                runs.append((current, span.prompt_start, span.prompt_tokens))
        blocks = tuple(_block(members, start, tokens, device) for members, start, tokens in runs)
        place = torch.empty(sum(length for members, _, _ in runs for _, length in members), dtype=torch.int64)
        offset = 0
        for members, _, _ in runs:
            longest = members[0][1]
            for start, length in members:
                place[start : start + length] = torch.arange(offset, offset + length)
                offset += longest
        return cls(blocks, place.to(device))

    def masks(self, window: int | None, dtype: torch.dtype) -> list[Tensor | None]:
        """Additive mask [L, prefix + L] of each block, None for plain causality; made once for all layers."""
        known = self._masks.get((window, dtype))
        if known is None:
            known = [
                None
                if block.prefix_tokens == 0 and (window is None or window >= block.length)
                else torch.zeros((), dtype=dtype, device=block.index.device).where(
                    block.allowed(window), torch.tensor(float("-inf"), dtype=dtype, device=block.index.device)
                )
                for block in self.blocks
            ]
            self._masks[window, dtype] = known
        return known


def _block(runs: list[tuple[int, int]], prefix_start: int, prefix_tokens: int, device: torch.device | str) -> Block:
    longest = runs[0][1]
    steps = torch.arange(longest)
    index = torch.stack([start + steps.clamp(max=length - 1) for start, length in runs]).flatten()
    real = torch.tensor([length for _, length in runs])
    padding = (steps >= real[:, None]).flatten().nonzero().squeeze(-1)
    return Block(
        index.to(device), len(runs), longest, prefix_start, prefix_tokens, padding.to(device) if len(padding) else None
    )


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: PackedLayout | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: query [1, H, T, D], key and value [1, K, T, D] to [1, T, H, D].

    BadInput where the model asks for what the blocks cannot represent (a mask of its own, soft-capped scores, attention
    sinks, dropout), because leaving it out would silently train another model than the engine samples from.
    """
    name = type(module).__name__
    if packed is None:
        raise BadInput(
            f"policy.path: the model's forward does not hand keyword arguments on to {name}, so sequences cannot be "
            "packed; use a model of a family whose attention takes them (Llama, Qwen, Mistral, Gemma 3, ...)"
        )
    asked = {"attention_mask": attention_mask} | {n: rest.get(n) for n in ("softcap", "s_aux", "position_bias")}
    unsupported = sorted(n for n, setting in asked.items() if setting is not None)
    if dropout:
        unsupported.append("dropout")
    if unsupported:
        raise BadInput(f"policy.path: {name} uses {', '.join(unsupported)}, which packed attention does not represent")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    masks = packed.masks(sliding_window, query.dtype)
    q, k, v = (
        tensor[0].transpose(0, 1) for tensor in (query, key, value)
    )  # [T, heads, D]: a token's row lies together
    out: Tensor = _PackedAttention.apply(q, k, v, packed, masks, scale)  # type: ignore[no-untyped-call]
    return out[None], None


AttentionInterface.register(PACKED, packed_attention)


class _PackedAttention(torch.autograd.Function):
    """Keeps its inputs only; backward computes each block's probabilities anew."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: PackedLayout,
        masks: list[Tensor | None],
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.rest = layout, masks, scale
        parts = []
        for block, mask in zip(layout.blocks, masks, strict=True):
            q, k, v = _operands(block, query, key, value)
            parts.append(_attend(q, k, v, mask, scale).transpose(1, 2).flatten(0, 1))
        return torch.cat(parts).index_select(0, layout.place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, key, value = ctx.saved_tensors
        layout, masks, scale = ctx.rest
        block_backward = _backward_by_products if _is_half_on_cpu(grad) else _backward_by_autograd
        own: list[list[Tensor]] = [[], [], []]
        shared: list[tuple[Block, Tensor, Tensor]] = []
        for block, mask in zip(layout.blocks, masks, strict=True):
            part = grad.index_select(0, block.index)
            if block.padding is not None:
                part.index_fill_(0, block.padding, 0.0)
            part = part.view(block.runs, block.length, *part.shape[1:]).transpose(1, 2)
            operands = _operands(block, query, key, value)
            q_grad, k_grad, v_grad = block_backward(*operands, mask, scale, part)
            if block.prefix_tokens:
                prefix = slice(None, block.prefix_tokens)
                shared.append((block, k_grad[:, :, prefix].sum(0), v_grad[:, :, prefix].sum(0)))
            for grads, whole in zip(own, (q_grad, k_grad, v_grad), strict=True):
                grads.append(whole[:, :, -block.length :].transpose(1, 2).flatten(0, 1))
        q_rows, k_rows, v_rows = (torch.cat(grads).index_select(0, layout.place) for grads in own)
        for block, k_prefix, v_prefix in shared:
            rows = slice(block.prefix_start, block.prefix_start + block.prefix_tokens)
            k_rows[rows] += k_prefix.transpose(0, 1)
            v_rows[rows] += v_prefix.transpose(0, 1)
        return q_rows, k_rows, v_rows, None, None, None


def _operands(block: Block, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[n, heads, L, D] of the queries and [n, heads, prefix + L, D] of keys and values."""

    def runs(rows: Tensor) -> Tensor:
        return rows.index_select(0, block.index).view(block.runs, block.length, *rows.shape[1:])

    def with_prefix(rows: Tensor) -> Tensor:
        if not block.prefix_tokens:
            return runs(rows)
        prefix = rows[block.prefix_start : block.prefix_start + block.prefix_tokens]
        return torch.cat([prefix.expand(block.runs, *prefix.shape), runs(rows)], dim=1)

    return runs(query).transpose(1, 2), with_prefix(key).transpose(1, 2), with_prefix(value).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _is_half_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in (torch.bfloat16, torch.float16)


def _backward_by_autograd(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Through the device's own fused kernel, forward and backward."""
    with torch.enable_grad():
        q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
        q_grad, k_grad, v_grad = torch.autograd.grad(_attend(q, k, v, mask, scale), (q, k, v), grad)
    return q_grad, k_grad, v_grad


def _backward_by_products(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Five plain matrix products. The CPU's fused backward does not use the bfloat16 matrix units and takes about
    four times as long for blocks of this size."""
    n, heads, length, _ = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    at_once = max(1, SCORE_BYTES // (4 * heads * length * keys))
    if n > at_once:
        parts = [
            _backward_by_products(q[part], k[part], v[part], mask, scale, grad[part])
            for part in (slice(start, start + at_once) for start in range(0, n, at_once))
        ]
        q_grad, k_grad, v_grad = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return q_grad, k_grad, v_grad
    # Query heads that share a key head stand under each other: one product for all of them, and no repeated keys.
    grouped = (n, kv_heads, heads // kv_heads * length, -1)
    q_flat, g_flat = (q * scale).reshape(grouped), grad.reshape(grouped)
    k, v = k.contiguous(), v.contiguous()
    if mask is None:
        mask = torch.full((length, keys), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    scores = (q_flat @ k.transpose(-1, -2)).view(n, kv_heads, -1, length, keys)
    probs = torch.softmax(scores.add_(mask), dim=-1).view(*grouped[:-1], keys)
    v_grad = probs.transpose(-1, -2) @ g_flat
    by_probs = g_flat @ v.transpose(-1, -2)
    by_scores = torch.ops.aten._softmax_backward_data(by_probs, probs, -1, q.dtype)  # sums in float32 within
    q_grad = (by_scores @ k).reshape(q.shape).mul_(scale)
    k_grad = by_scores.transpose(-1, -2) @ q_flat
    return q_grad, k_grad, v_grad
