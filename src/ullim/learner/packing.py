"""A micro-batch as one row of tokens, without padding, every prompt once.

    token      p0 p1 p2 | a0 a1 | b0 b1 b2 | q0 q1 | c0 ...
    position    0  1  2 |  3  4 |  3  4  5 |  0  1 |  2 ...

A completion sees its own prompt and itself; which tokens may see which is `attention.PackedLayout`'s business. Logits
are needed where a completion token is predicted: the last prompt token predicts the first token of *every* member,
and a completion's last token predicts nothing, so it is not even computed.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ullim.errors import BadInput
from ullim.learner.attention import PackedLayout, Span
from ullim.learner.partition import MicroBatch
from ullim.records import FloatArray, IntArray, Sequence

EMPTY = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One forward pass. T tokens go in; N completion tokens, of B sequences with at most L tokens, are predicted."""

    input_ids: Tensor  # int64 [1, T]
    position_ids: Tensor  # int64 [1, T]
    layout: PackedLayout
    rows: Tensor  # int64 [N], place in T whose hidden state predicts each completion token
    targets: Tensor  # int64 [N], the completion tokens, sequence after sequence
    lengths: tuple[int, ...]  # [B], sums to N
    members: tuple[int, ...]  # [B], places in the learner batch
    mask: Tensor  # bool [B, L], true for completion tokens; all false in an empty micro-batch

    def grid(self, flat: Tensor) -> Tensor:
        """[N] by sequence to [B, L], 0 where masked; differentiable."""
        return flat.new_zeros(self.mask.shape).masked_scatter(self.mask, flat)

    def fill(self, arrays: SequenceOf[FloatArray]) -> Tensor:
        """One float array [length] per sequence to float32 [B, L], 0 where masked."""
        flat = np.concatenate([EMPTY, *arrays]).astype(np.float32)
        return self.grid(torch.from_numpy(flat).to(self.mask.device))


def pack(sequences: SequenceOf[Sequence], micro_batch: MicroBatch, device: torch.device | str = "cpu") -> PackedBatch:
    """Lay the pieces of one micro-batch out after each other.

    An empty micro-batch becomes one arbitrary token that predicts nothing: its pass joins the collectives of the other
    ranks and contributes exactly 0.
    """
    ids: list[IntArray] = []
    positions: list[IntArray] = []
    spans: list[Span] = []
    rows: list[IntArray] = []
    members = tuple(member for piece in micro_batch for member in piece.members)
    total = 0
    for piece in micro_batch:
        prompt = sequences[piece.members[0]].prompt_ids
        ids.append(prompt)
        positions.append(np.arange(len(prompt), dtype=np.int32))
        prompt_start, total = total, total + len(prompt)
        starts, lengths = [], []
        for member in piece.members:
            fed = sequences[member].token_ids[:-1]
            ids.append(fed)
            positions.append(np.arange(len(prompt), len(prompt) + len(fed), dtype=np.int32))
            own = np.arange(total, total + len(fed), dtype=np.int32)
            rows.append(np.concatenate([np.array([prompt_start + len(prompt) - 1], dtype=np.int32), own]))
            starts.append(total)
            lengths.append(len(fed))
            total += len(fed)
        spans.append(Span(prompt_start, len(prompt), tuple(starts), tuple(lengths)))
    if not micro_batch:
        ids, positions, spans = [np.zeros(1, np.int32)], [np.zeros(1, np.int32)], [Span(0, 1, (), ())]
    lengths_of = tuple(len(sequences[member].token_ids) for member in members)
    mask = torch.arange(max(lengths_of, default=1)) < torch.tensor(lengths_of or (0,))[:, None]

    def tensor(parts: SequenceOf[IntArray]) -> Tensor:
        return torch.from_numpy(np.concatenate([EMPTY, *parts]).astype(np.int64)).to(device)

    return PackedBatch(
        input_ids=tensor(ids)[None],
        position_ids=tensor(positions)[None],
        layout=PackedLayout.of(spans, device),
        rows=tensor(rows),
        targets=tensor([sequences[member].token_ids for member in members]),
        lengths=lengths_of,
        members=members,
        mask=mask.to(device),
    )


def check_sequences(sequences: SequenceOf[Sequence], *, vocabulary: int, context: int) -> None:
    """BadInput where a sequence cannot be computed; names its place and what is wrong.

    Groups must share one prompt, since it is computed once; a token outside the vocabulary would read foreign memory
    on some devices.
    """
    prompts: dict[int, tuple[int, IntArray]] = {}
    for place, sequence in enumerate(sequences):
        here = f"batch.sequences[{place}] (group {sequence.group})"
        if len(sequence.prompt_ids) == 0 or len(sequence.token_ids) == 0:
            raise BadInput(f"{here}: prompt and completion need at least one token each")
        if len(sequence.rollout_logprobs) != len(sequence.token_ids):
            raise BadInput(
                f"{here}: {len(sequence.rollout_logprobs)} rollout_logprobs for {len(sequence.token_ids)} tokens"
            )
        length = len(sequence.prompt_ids) + len(sequence.token_ids)
        if length > context:
            raise BadInput(f"{here}: {length} tokens with its prompt, the model's context holds {context}")
        for ids in (sequence.prompt_ids, sequence.token_ids):
            if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
                raise BadInput(
                    f"{here}: token ids lie in [{ids.min()}, {ids.max()}], the model knows [0, {vocabulary})"
                )
        first, prompt = prompts.setdefault(sequence.group, (place, sequence.prompt_ids))
        if not np.array_equal(prompt, sequence.prompt_ids):
            raise BadInput(f"{here}: its prompt differs from that of batch.sequences[{first}] in the same group")
