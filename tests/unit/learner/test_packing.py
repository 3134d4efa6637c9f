"""The packed row, worked out by hand, and what cannot be packed."""

import numpy as np
import pytest
import torch

from ullim.errors import BadInput
from ullim.learner.packing import check_sequences, pack
from ullim.learner.partition import Piece
from ullim.records import Sequence


def sequence(prompt: list[int], tokens: list[int], group: int = 0) -> Sequence:
    n = len(tokens)
    prompt_ids, token_ids, versions = (np.array(ids, np.int32) for ids in (prompt, tokens, [0] * n))
    return Sequence(prompt_ids, token_ids, np.full(n, -1.0, np.float32), 0.5, group, versions)


BATCH = [sequence([10, 11, 12], [1, 2, 3]), sequence([10, 11, 12], [4]), sequence([20, 21], [5, 6], group=1)]


def test_row_by_hand():
    packed = pack(BATCH, (Piece(0, 3, (0, 1), (3, 1)), Piece(1, 2, (2,), (2,))))
    # prompt once, then what each completion feeds: all but its last token (the second member feeds nothing)
    assert packed.input_ids.tolist() == [[10, 11, 12, 1, 2, 20, 21, 5]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    # token 1 comes after 12 at place 2, token 2 after 1, token 3 after 2; the second member's 4 after the same 12
    assert packed.rows.tolist() == [2, 3, 4, 2, 6, 7]
    assert packed.targets.tolist() == [1, 2, 3, 4, 5, 6]
    assert packed.lengths == (3, 1, 2)
    assert packed.members == (0, 1, 2)
    assert packed.mask.tolist() == [[True, True, True], [True, False, False], [True, True, False]]


def test_grid_puts_each_sequence_in_its_row_and_passes_gradients():
    packed = pack(BATCH, (Piece(0, 3, (0, 1), (3, 1)), Piece(1, 2, (2,), (2,))))
    flat = torch.arange(1.0, 7.0, requires_grad=True)
    grid = packed.grid(flat)
    assert grid.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    (grid * torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])).sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [1, 2, 3, 4, 7, 8]
    assert packed.fill([np.array([1, 2, 3]), np.array([4]), np.array([5, np.nan])])[2].isnan().tolist() == [
        False,
        True,
        False,
    ]


def test_an_empty_micro_batch_is_one_token_that_predicts_nothing():
    packed = pack(BATCH, ())
    assert packed.input_ids.shape == (1, 1)
    assert packed.targets.shape == packed.rows.shape == (0,)
    assert packed.members == ()
    assert packed.mask.tolist() == [[False]]
    assert packed.grid(torch.zeros(0)).tolist() == [[0.0]]
    assert packed.fill([]).tolist() == [[0.0]]


def broken(**changes: object) -> Sequence:
    fields = {
        name: getattr(BATCH[0], name)
        for name in ("prompt_ids", "token_ids", "rollout_logprobs", "advantage", "group", "versions")
    }
    return Sequence(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([broken(prompt_ids=np.zeros(0, np.int32))], r"sequences\[0\].*at least one token"),
        ([BATCH[2], broken(token_ids=np.zeros(0, np.int32))], r"sequences\[1\].*at least one token"),
        ([broken(rollout_logprobs=np.zeros(2, np.float32))], r"2 rollout_logprobs for 3 tokens"),
        ([broken(token_ids=np.array([1, 2, 30], np.int32))], r"lie in \[1, 30\].*\[0, 30\)"),
        ([broken(token_ids=np.array([1, -1, 3], np.int32))], r"lie in \[-1, 3\]"),
        ([broken(prompt_ids=np.arange(6, dtype=np.int32))], r"9 tokens with its prompt.*holds 8"),
        ([BATCH[0], broken(prompt_ids=np.array([10, 11, 13], np.int32))], r"differs from that of batch.sequences\[0\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_named(sequences, message):
    with pytest.raises(BadInput, match=message):
        check_sequences(sequences, vocabulary=30, context=8)


def test_good_sequences_pass():
    check_sequences(BATCH, vocabulary=22, context=6)
