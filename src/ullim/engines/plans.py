"""The two attention plans: packed segments (prompts, recomputation, scoring) and one token per running row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ullim.engines.kvcache import LayerShape, SlotStore


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence within a packed pass.

    `target` is the slot that takes their keys and values (from its beginning), `past` the slot whose first
    `past_length` tokens come before them.
    """

    start: int
    end: int
    target: int | None = None
    past: int | None = None
    past_length: int = 0


class SegmentPlan:
    """Each segment attends to itself causally, and to all of its past."""

    def __init__(
        self, segments: Sequence[Segment], *, target: SlotStore | None = None, past: SlotStore | None = None
    ) -> None:
        self._segments = segments
        self._target = target
        self._past = past

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self._target is None:
            return
        for segment in self._segments:
            if segment.target is not None:
                tokens = slice(segment.start, segment.end)
                length = segment.end - segment.start
                self._target.keys[layer][segment.target, :, :length] = keys[:, tokens]
                self._target.values[layer][segment.target, :, :length] = values[:, tokens]

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        out = query.new_empty(query.shape[1], query.shape[0], values.shape[-1])
        for segment in self._segments:
            tokens = slice(segment.start, segment.end)
            own_keys, own_values = keys[:, tokens], values[:, tokens]
            mask = None
            if self._past is not None and segment.past is not None and segment.past_length:
                seen = segment.past_length
                own_keys = torch.cat([self._past.keys[layer][segment.past, :, :seen], own_keys], dim=1)
                own_values = torch.cat([self._past.values[layer][segment.past, :, :seen], own_values], dim=1)
                length = segment.end - segment.start
                mask = torch.ones(length, seen + length, dtype=torch.bool, device=query.device).tril(seen)
            attended = functional.scaled_dot_product_attention(
                query[None, :, tokens],
                own_keys[None],
                own_values[None],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=query.shape[0] != keys.shape[0],
            )
            out[tokens] = attended[0].transpose(0, 1)
        return out


class ShapeRecorder(SegmentPlan):
    """A segment plan that keeps nothing but learns what each layer would cache."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        super().__init__(segments)
        self.shapes: dict[int, LayerShape] = {}

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.shapes[layer] = LayerShape(keys.shape[0], keys.shape[-1], values.shape[-1])


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Which rows share which prompt. B rows, G prompts, M the most rows of one prompt.

    `gather` [G·M] names for each place of a padded [G, M] table its row (any row where the place is empty), `place`
    [B] the place of each row. `prompt_mask` is an additive [G, 1, 1, P], None where all prompts are equally long.
    """

    prompts: int
    prompt_length: int
    gather: torch.Tensor
    place: torch.Tensor
    prompt_mask: torch.Tensor | None
    identity: bool  # the rows already stand in that table's order: gathering would change nothing


class DecodePlan:
    """One new token per row: attention to the shared prompt and to the row's own answer, joined exactly.

    A prompt's keys are read once for all its rows: with 8 answers to a prompt that is most of the cache traffic.
    The two parts are joined by their log-sum-exp l: out = σ(l₁−l₂)·out₁ + σ(l₂−l₁)·out₂.
    """

    def __init__(
        self, prompts: SlotStore, answers: SlotStore, layout: RowLayout, positions: torch.Tensor, length: int
    ) -> None:
        """`positions` [B]: where in its answer slot each row's new token goes; `length` is the largest plus one."""
        self._prompts = prompts
        self._answers = answers
        self._layout = layout
        self._positions = positions
        self._length = length
        self._rows = torch.arange(len(positions), device=positions.device)
        dtype = answers.keys[0].dtype
        reachable = torch.arange(length, device=positions.device) <= positions[:, None]
        self._mask = torch.zeros(len(positions), 1, 1, length, dtype=dtype, device=positions.device)
        self._mask.masked_fill_(~reachable[:, None, None], float("-inf"))

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._answers.keys[layer][self._rows, :, self._positions] = keys.transpose(0, 1)
        self._answers.values[layer][self._rows, :, self._positions] = values.transpose(0, 1)

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        rows, heads = query.transpose(0, 1), keys.shape[0]
        answer_out, answer_lse = attend_with_lse(
            rows.unsqueeze(2),
            self._answers.keys[layer][: len(rows), :, : self._length],
            self._answers.values[layer][: len(rows), :, : self._length],
            self._mask,
            scale,
        )
        prompt_out, prompt_lse = self._attend_prompt(layer, rows, heads, scale)
        share = torch.sigmoid(prompt_lse - answer_lse.squeeze(2)).unsqueeze(-1)
        return torch.lerp(answer_out.squeeze(2).float(), prompt_out.float(), share).to(query.dtype)

    def _attend_prompt(
        self, layer: int, rows: torch.Tensor, heads: int, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Out [B, query heads, value_dim] and log-sum-exp [B, query heads] of the rows over their prompts."""
        layout, query_heads, dim = self._layout, rows.shape[1], rows.shape[2]
        prompts, shared = layout.prompts, query_heads // heads
        table = rows if layout.identity else rows.index_select(0, layout.gather)
        members = len(table) // prompts
        folded = table.view(prompts, members, heads, shared, dim).transpose(1, 2)
        out, lse = attend_with_lse(
            folded.reshape(prompts, heads, members * shared, dim),
            self._prompts.keys[layer][:prompts, :, : layout.prompt_length],
            self._prompts.values[layer][:prompts, :, : layout.prompt_length],
            layout.prompt_mask,
            scale,
        )
        out = out.view(prompts, heads, members, shared, -1).transpose(1, 2).reshape(len(table), query_heads, -1)
        lse = lse.view(prompts, heads, members, shared).transpose(1, 2).reshape(len(table), query_heads)
        if layout.identity:
            return out, lse
        return out.index_select(0, layout.place), lse.index_select(0, layout.place)


def attend_with_lse(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [B, Hq, q, value_dim] and the float32 log-sum-exp [B, Hq, q] of its scores; Hq a multiple of H.

    On a CPU torch's own flash kernel gives both without the scores ever being written out; elsewhere the plain
    formula in float32.
    """
    if query.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, attn_mask=mask, scale=scale
        )
        return out, lse
    shared = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
    scores = torch.matmul(query, keys.transpose(-1, -2)).float() * (scale or query.shape[-1] ** -0.5)
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, dim=-1)
    return torch.matmul(torch.exp(scores - lse.unsqueeze(-1)).to(values.dtype), values), lse
