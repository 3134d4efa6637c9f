"""Forward passes: prompts, decoding, recomputation after new weights, scoring."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ullim.engines.attention import AttentionPlan, use_plan
from ullim.engines.batch import LiveBatch
from ullim.engines.plans import DecodePlan, Segment, SegmentPlan
from ullim.engines.sequences import Group
from ullim.records import FloatArray


class Runner:
    """Runs `model` over packed tokens. `pass_tokens` bounds the tokens of one pass, and with them its memory."""

    def __init__(self, model: Any, *, device: torch.device, pass_tokens: int) -> None:
        self._model = model
        self._device = device
        self.pass_tokens = pass_tokens
        self.passed_tokens = 0  # of packed passes, for the benchmark

    def prefill(self, batch: LiveBatch, groups: Sequence[Group]) -> None:
        """Compute the prompts of `groups` into their slots; groups with members to start get `first_logits`."""
        for chunk in self._chunks([g.prompt for g in groups]):
            part = [groups[i] for i in chunk]
            segments = _segments([len(g.prompt) for g in part], targets=[g.slot for g in part])
            logits = self._packed(
                SegmentPlan(segments, target=batch.prompts),
                [g.prompt for g in part],
                starts=[0] * len(part),
                keep=[s.end - 1 for s in segments],
            )
            for group, row in zip(part, logits, strict=True):
                if group.unstarted:
                    group.first_logits = row.clone()

    def recompute(self, batch: LiveBatch) -> None:
        """Fill both stores anew under the present weights."""
        batch.make_room()
        self.prefill(batch, batch.groups)
        slots = [slot for slot, row in enumerate(batch.rows) if len(row.tokens) > 1]
        answers = [batch.rows[slot].tokens[:-1] for slot in slots]
        for chunk in self._chunks(answers):
            groups = [batch.rows[slots[i]].group for i in chunk]
            segments = _segments(
                [len(answers[i]) for i in chunk],
                targets=[slots[i] for i in chunk],
                pasts=[(g.slot, len(g.prompt)) for g in groups],
            )
            self._packed(
                SegmentPlan(segments, target=batch.answers, past=batch.prompts),
                [answers[i] for i in chunk],
                starts=[len(g.prompt) for g in groups],
                keep=[0],
            )

    def decode(self, batch: LiveBatch) -> torch.Tensor:
        """Feed each row's newest token; logits [B, V] for the next."""
        newest = torch.tensor([row.tokens[-1] for row in batch.rows], device=self._device)
        slots = [len(row.tokens) - 1 for row in batch.rows]
        positions = torch.tensor(
            [len(row.group.prompt) + slot for row, slot in zip(batch.rows, slots, strict=True)], device=self._device
        )
        plan = DecodePlan(
            batch.prompts,
            batch.answers,
            batch.layout(),
            torch.tensor(slots, device=self._device),
            max(slots) + 1,
        )
        return self._forward(plan, newest, positions, None)

    def score(self, sequences: Sequence[tuple[list[int], list[int]]], temperature: float) -> list[FloatArray]:
        """Log-probs [L] of each completion after its prompt, under softmax(logits/temperature)."""
        scores: list[FloatArray] = [np.zeros(0, dtype=np.float32) for _ in sequences]
        # The last token is only ever a target, never an input.
        inputs = [[*prompt, *completion][:-1] for prompt, completion in sequences]
        for chunk in self._chunks(inputs):
            part = [i for i in chunk if sequences[i][1]]
            if not part:
                continue
            segments = _segments([len(inputs[i]) for i in part])
            keep: list[int] = []
            for segment, index in zip(segments, part, strict=True):
                keep.extend(range(segment.end - len(sequences[index][1]), segment.end))
            logits = self._packed(SegmentPlan(segments), [inputs[i] for i in part], starts=[0] * len(part), keep=keep)
            start = 0
            for index in part:
                targets = torch.tensor(sequences[index][1], device=self._device)
                rows = logits[start : start + len(targets)].float()
                start += len(targets)
                rows = rows / temperature if temperature else rows
                logprobs = rows.gather(1, targets[:, None])[:, 0] - torch.logsumexp(rows, dim=-1)
                scores[index] = logprobs.cpu().numpy()
        return scores

    def _chunks(self, sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Indices of neighbours that fit one pass together; a sequence longer than a pass goes alone."""
        chunk: list[int] = []
        tokens = 0
        for index, sequence in enumerate(sequences):
            if chunk and tokens + len(sequence) > self.pass_tokens:
                yield chunk
                chunk, tokens = [], 0
            chunk.append(index)
            tokens += len(sequence)
        if chunk:
            yield chunk

    def _packed(
        self, plan: AttentionPlan, sequences: Sequence[Sequence[int]], starts: Sequence[int], keep: Sequence[int]
    ) -> torch.Tensor:
        """One pass over `sequences` laid end to end, each from its own start position; logits [len(keep), V]."""
        ids = torch.tensor([token for sequence in sequences for token in sequence], device=self._device)
        positions = torch.cat(
            [torch.arange(s, s + len(q), device=self._device) for s, q in zip(starts, sequences, strict=True)]
        )
        self.passed_tokens += len(ids)
        return self._forward(plan, ids, positions, torch.tensor(keep, device=self._device))

    def _forward(
        self, plan: AttentionPlan, ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        with use_plan(plan) as cache:
            output = self._model(
                input_ids=ids[None],
                position_ids=positions[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=0 if keep is None else keep,
            )
        logits: torch.Tensor = output.logits
        return logits[0]


def _segments(
    lengths: Sequence[int],
    targets: Sequence[int] | None = None,
    pasts: Sequence[tuple[int, int]] | None = None,
) -> list[Segment]:
    segments: list[Segment] = []
    start = 0
    for index, length in enumerate(lengths):
        past, past_length = pasts[index] if pasts is not None else (None, 0)
        target = targets[index] if targets is not None else None
        segments.append(Segment(start, start + length, target=target, past=past, past_length=past_length))
        start += length
    return segments
