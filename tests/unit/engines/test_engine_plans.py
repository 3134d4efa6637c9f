"""Attention plans against the plain formula, and the batch's bookkeeping under any order of joins and leaves."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullim.engines.base import GenerationRequest, Sampling
from ullim.engines.batch import LiveBatch
from ullim.engines.kvcache import LayerShape, SlotStore
from ullim.engines.plans import DecodePlan, Segment, SegmentPlan, attend_with_lse
from ullim.engines.sequences import Group, Row, Sink
from ullim.engines.stopping import StopRule

CPU = torch.device("cpu")
HEADS, SHARED, DIM = 2, 3, 8


def store(slots: int = 0, length: int = 0, budget: int = 1 << 20) -> SlotStore:
    made = SlotStore([LayerShape(HEADS, DIM, DIM)], dtype=torch.float32, device=CPU, budget_bytes=budget, length_step=4)
    if slots:
        made.reserve(slots, length, 0)
    return made


def plain_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Query [query heads, DIM] over keys [HEADS, n, DIM] in float64, the last query position; [query heads, DIM]."""
    keys, values = keys.repeat_interleave(SHARED, 0).double(), values.repeat_interleave(SHARED, 0).double()
    scores = torch.einsum("hd,hnd->hn", query.double(), keys) / DIM**0.5
    return torch.einsum("hn,hnd->hd", torch.softmax(scores, -1), values)


def test_segments_see_themselves_causally_their_past_and_nobody_else() -> None:
    torch.manual_seed(0)
    past, target = store(2, 5), store(3, 6)
    past.keys[0].normal_()
    past.values[0].normal_()
    segments = [Segment(0, 4, target=2, past=1, past_length=3), Segment(4, 7), Segment(7, 8, target=0)]
    query, keys, values = torch.randn(6, 8, DIM), torch.randn(2, 8, DIM), torch.randn(2, 8, DIM)
    plan = SegmentPlan(segments, target=target, past=past)
    plan.store(0, keys, values)
    out = plan.attend(0, query, keys, values, DIM**-0.5)
    for segment in segments:
        for token in range(segment.start, segment.end):
            seen = slice(segment.start, token + 1)
            all_keys, all_values = keys[:, seen], values[:, seen]
            if segment.past is not None:
                all_keys = torch.cat([past.keys[0][1, :, :3], all_keys], 1)
                all_values = torch.cat([past.values[0][1, :, :3], all_values], 1)
            expected = plain_attention(query[:, token], all_keys, all_values)
            torch.testing.assert_close(out[token].double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(target.keys[0][2, :, :4], keys[:, :4])
    torch.testing.assert_close(target.values[0][0, :, :1], values[:, 7:])
    assert not target.keys[0][1].any()


@pytest.mark.parametrize("mask_rows", [False, True])
def test_both_ways_of_attention_give_the_same_output_and_log_sum_exp(
    mask_rows: bool,
) -> None:
    torch.manual_seed(1)
    query, keys, values = torch.randn(3, 6, 2, DIM), torch.randn(3, 2, 7, DIM), torch.randn(3, 2, 7, DIM)
    mask = torch.zeros(3, 1, 1, 7)
    mask[1, :, :, 4:] = float("-inf")
    given_mask = mask if mask_rows else None
    flash = attend_with_lse(query, keys, values, given_mask, 0.3)
    # Values wider than keys are what the flash kernel does not take; the extra column must not disturb the others.
    wide = torch.cat([values, torch.ones(3, 2, 7, 1)], -1)
    plain = attend_with_lse(query, keys, wide, given_mask, 0.3)
    torch.testing.assert_close(flash[0], plain[0][..., :DIM], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(plain[0][..., DIM], torch.ones(3, 6, 2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(flash[1], plain[1], atol=1e-5, rtol=1e-5)


def make_group(name: str, prompt: int, members: int) -> Group:
    request = GenerationRequest(name, np.zeros(prompt, dtype=np.int32), members, Sampling())
    nobody = Sink(None)  # type: ignore[arg-type]  # nothing is ever delivered here
    group = Group(request, nobody, [0] * prompt, StopRule((), (), None), seed=0, limit=9)
    group.started = members
    return group


def fill(batch: LiveBatch, group: Group, rows: list[Row]) -> None:
    """Write numbers into the stores that tell whose they are."""
    number = float(group.request.request_id)
    batch.prompts.keys[0][group.slot] = number
    for row in rows:
        batch.answers.keys[0][batch.rows.index(row)] = number + (1 + row.member) / 100


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_slots_stay_dense_and_keep_their_contents_whoever_leaves(data: st.DataObject) -> None:
    batch = LiveBatch(store(), store(), CPU)
    alive: list[Row] = []
    for step in range(data.draw(st.integers(1, 6))):
        group = make_group(str(step + 1), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4)))
        rows = [Row(group, m, tokens=[0] * data.draw(st.integers(1, 5))) for m in range(group.request.n)]
        batch.add_groups([group])
        batch.add_rows(rows)
        fill(batch, group, rows)
        alive += rows
        leaving = data.draw(st.lists(st.sampled_from(alive), unique_by=id)) if alive else []
        batch.remove(leaving)
        alive = [row for row in alive if not any(row is left for left in leaving)]
        assert set(map(id, batch.rows)) == set(map(id, alive))
        assert {id(r.group) for r in alive} == set(map(id, batch.groups))
        for slot, group in enumerate(batch.groups):
            assert group.slot == slot
            prompt = batch.prompts.keys[0][slot, :, : len(group.prompt)]
            assert bool((prompt == float(group.request.request_id)).all())
        for slot, row in enumerate(batch.rows):
            kept = batch.answers.keys[0][slot, :, : len(row.tokens) - 1]
            number = float(row.group.request.request_id) + (1 + row.member) / 100
            torch.testing.assert_close(kept, torch.full_like(kept, number))
        if alive:
            layout = batch.layout()
            table = layout.gather.view(layout.prompts, -1)
            for slot, row in enumerate(batch.rows):
                assert int(layout.gather[layout.place[slot]]) == slot
                assert slot in table[row.group.slot].tolist()
            if layout.identity:
                assert layout.gather.tolist() == list(range(len(batch.rows)))


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 1000), shape=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4)
)
def test_one_decoding_step_equals_attention_over_prompt_and_answer(seed: int, shape: list[tuple[int, int]]) -> None:
    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    batch = LiveBatch(store(), store(), CPU)
    for index, (prompt, members) in enumerate(shape):
        group = make_group(str(index), prompt, members)
        batch.add_groups([group])
        batch.add_rows(
            [Row(group, m, tokens=[0] * int(torch.randint(1, 6, (), generator=generator))) for m in range(members)]
        )
    order = torch.randperm(len(batch.rows), generator=generator).tolist()
    batch.rows[:] = [batch.rows[i] for i in order]
    for tensors in (batch.prompts, batch.answers):
        tensors.keys[0].copy_(randn(*tensors.keys[0].shape))
        tensors.values[0].copy_(randn(*tensors.values[0].shape))
    rows = len(batch.rows)
    query, keys, values = randn(HEADS * SHARED, rows, DIM), randn(HEADS, rows, DIM), randn(HEADS, rows, DIM)
    positions = torch.tensor([len(row.tokens) - 1 for row in batch.rows])
    plan = DecodePlan(batch.prompts, batch.answers, batch.layout(), positions, int(positions.max()) + 1)
    plan.store(0, keys, values)
    out = plan.attend(0, query, keys, values, DIM**-0.5)
    for slot, row in enumerate(batch.rows):
        seen: list[torch.Tensor] = []
        for old, new in ((lambda s: s.keys[0], keys), (lambda s: s.values[0], values)):
            prompt_part = old(batch.prompts)[row.group.slot, :, : len(row.group.prompt)]
            answer_part = old(batch.answers)[slot, :, : len(row.tokens) - 1]
            seen.append(torch.cat([prompt_part, answer_part, new[:, slot : slot + 1]], 1))
        expected = plain_attention(query[:, slot], *seen)
        torch.testing.assert_close(out[slot].double(), expected, atol=1e-5, rtol=1e-5)


def test_a_store_grows_in_steps_keeps_what_lives_and_is_exact_beyond_its_budget() -> None:
    made = store(2, 3)
    assert made.length == 4
    made.keys[0][:2] = 7.0
    made.reserve(5, 6, live_slots=2)
    assert (made.slots >= 5, made.length) == (True, 8)
    assert bool((made.keys[0][:2, :, :4] == 7.0).all())
    assert not made.keys[0][2:].any()
    assert made.bytes_for(3, 5) == 3 * 8 * HEADS * 2 * DIM * 4
    tight = store(budget=1)
    tight.reserve(3, 5, 0)
    assert (tight.slots, tight.length) == (3, 8)
    before = tight.keys[0]
    tight.reserve(2, 8, 2)
    assert tight.keys[0] is before
    tight.release()
    assert (tight.slots, tight.length, tight.keys[0].numel()) == (0, 0, 0)


def test_stop_strings_are_found_across_token_borders_and_only_in_the_answer() -> None:
    class Pieces:
        pieces = ("ab", "c", "de", "f", "", "x")

        def decode(self, token_ids: Any, **_: Any) -> str:
            return "".join(self.pieces[i] for i in token_ids)

    rule = StopRule((5,), ("bcd", "ff"), Pieces())
    assert not rule.reached([0])
    assert not rule.reached([0, 1])
    assert rule.reached([0, 1, 2])
    assert rule.reached([3, 3])
    assert rule.reached([1] * 30 + [0, 1, 2])
    assert not rule.reached([3, 4])
    assert rule.reached([0, 5])
    assert not StopRule((), (), None).reached([5])
