"""Cutting a batch: nothing lost, nothing twice, budgets kept, ranks in step."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullim.learner.partition import MAX_IMBALANCE, Piece, cut_batch
from ullim.records import IntArray, Sequence


def sequences(*groups: tuple[int, list[int]]) -> list[Sequence]:
    """One group per (prompt tokens, completion tokens of each member)."""

    def ones(count: int) -> IntArray:
        return np.ones(count, np.int32)

    return [
        Sequence(ones(prompt), ones(tokens), np.zeros(tokens, np.float32), 0.0, group, ones(tokens))
        for group, (prompt, lengths) in enumerate(groups)
        for tokens in lengths
    ]


group_lists = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1, max_size=8)), min_size=1, max_size=9
)


@given(group_lists, st.integers(1, 4), st.integers(1, 4), st.integers(1, 200), st.randoms())
@settings(deadline=None, max_examples=50)
def test_every_sequence_is_computed_exactly_once(groups, updates, ranks, budget, random):
    batch = sequences(*groups)
    random.shuffle(batch)  # groups may interleave
    cut = cut_batch(batch, updates=updates, ranks=ranks, micro_batch_tokens=budget)

    pieces = [p for update in cut for rank in update.ranks for micro in rank for p in micro]
    assert Counter(m for p in pieces for m in p.members) == Counter(range(len(batch)))
    assert Counter(m for update in cut for m in update.members) == Counter(range(len(batch)))
    for update in cut:
        assert len(update.ranks) == ranks
        assert len({len(rank) for rank in update.ranks}) == 1, "ranks with unequal numbers of passes wait for ever"
        computed = [m for rank in update.ranks for micro in rank for p in micro for m in p.members]
        assert sorted(computed) == list(update.members)
    for piece in pieces:
        assert {batch[m].group for m in piece.members} == {piece.group}
        assert piece.member_tokens == tuple(len(batch[m].token_ids) for m in piece.members)
        assert piece.prompt_tokens == len(batch[piece.members[0]].prompt_ids)


@given(group_lists, st.integers(1, 3), st.integers(1, 200))
@settings(deadline=None, max_examples=50)
def test_a_micro_batch_exceeds_its_budget_only_for_a_single_completion(groups, ranks, budget):
    for update in cut_batch(sequences(*groups), updates=1, ranks=ranks, micro_batch_tokens=budget):
        for rank in update.ranks:
            for micro in rank:
                alone = len(micro) == 1 and len(micro[0].members) == 1
                assert alone or sum(piece.tokens for piece in micro) <= budget


def test_groups_stay_whole_where_they_fit():
    batch = sequences(*[(10, [5, 5, 5, 5])] * 6)
    (update,) = cut_batch(batch, updates=1, ranks=2, micro_batch_tokens=60)
    # 30 tokens a group: three groups a rank, two to a micro-batch
    assert [[[p.group for p in micro] for micro in rank] for rank in update.ranks] == [[[0, 2], [4]], [[1, 3], [5]]]
    assert all(len(p.members) == 4 for rank in update.ranks for micro in rank for p in micro)


def test_a_lone_group_is_shared_by_the_ranks():
    (update,) = cut_batch(sequences((10, [20, 20, 20, 20])), updates=1, ranks=2, micro_batch_tokens=1000)
    assert [[p.members for p in rank[0]] for rank in update.ranks] == [[(0, 1)], [(2, 3)]]


def test_pieces_of_one_group_on_one_rank_are_joined_again():
    # One long completion for rank 0; the rest, split off on the way, belongs to rank 1 and needs its prompt once.
    (update,) = cut_batch(sequences((2, [12, 3, 3, 3, 3])), updates=1, ranks=2, micro_batch_tokens=1000)
    assert [[p.members for p in micro] for rank in update.ranks for micro in rank] == [[(0,)], [(1, 2, 3, 4)]]


def test_ranks_left_over_get_empty_micro_batches():
    (update,) = cut_batch(sequences((3, [4])), updates=1, ranks=3, micro_batch_tokens=100)
    assert update.ranks == (((Piece(0, 3, (0,), (4,)),),), ((),), ((),))


def test_loads_are_even_where_splitting_can_make_them_so():
    batch = sequences(*[(5, [10] * 8), (5, [10] * 8), (5, [10] * 8)])
    (update,) = cut_batch(batch, updates=1, ranks=2, micro_batch_tokens=10_000)
    loads = [sum(p.tokens for micro in rank for p in micro) for rank in update.ranks]
    assert max(loads) <= MAX_IMBALANCE * sum(loads) / 2


def test_updates_take_equal_shares_of_the_groups_in_order():
    batch = sequences(*[(3, [2, 2])] * 6)
    cut = cut_batch(batch, updates=3, ranks=1, micro_batch_tokens=100)
    assert [update.members for update in cut] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]


def test_more_updates_than_groups_leaves_the_surplus_out():
    cut = cut_batch(sequences((3, [2]), (3, [2])), updates=4, ranks=1, micro_batch_tokens=100)
    assert [update.members for update in cut] == [(0,), (1,)]


def test_an_oversized_group_is_halved_at_the_budget():
    (update,) = cut_batch(sequences((10, [5, 5, 5, 5])), updates=1, ranks=1, micro_batch_tokens=20)
    assert [[p.members for p in micro] for micro in update.ranks[0]] == [[(0, 1)], [(2, 3)]]


@pytest.mark.parametrize("lengths", [[1, 1], [9, 1], [1, 9], [3, 4, 5]])
def test_halves_are_never_empty(lengths):
    piece = Piece(0, 2, tuple(range(len(lengths))), tuple(lengths))
    left, right = piece.halves()
    assert left.members
    assert right.members
    assert left.joined(right) == piece
