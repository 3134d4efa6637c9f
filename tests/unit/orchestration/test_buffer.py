"""Oldest first, nothing stale trained, nothing delivered twice."""

import numpy as np
import pytest

from ullim.orchestration.buffer import RolloutBuffer
from ullim.records import Completion, Message, Prompt, RolloutGroup


def group(ticket: int, version: int, members: int = 2) -> RolloutGroup:
    prompt = Prompt(f"p{ticket}", ticket, (Message("user", "hi"),), np.array([1], dtype=np.int32))
    completion = Completion(
        token_ids=np.array([5, 6], dtype=np.int32),
        logprobs=np.array([-1.0, -1.0], dtype=np.float32),
        versions=np.array([version, version + 1], dtype=np.int32),
        finish="stop",
        text="",
    )
    return RolloutGroup(ticket, prompt, (completion,) * members, "node-0")


def buffer(max_staleness: int = 1) -> RolloutBuffer:
    return RolloutBuffer(lambda oldest, learner: learner - oldest <= max_staleness)


def test_groups_leave_in_order_of_their_tickets_whatever_order_they_came_in() -> None:
    ready = buffer()
    for ticket in (4, 1, 3):
        ready.put(group(ticket, version=0))
    assert [g.ticket for g in ready.take(2, learner_version=0)] == [1, 3]
    assert ready.tickets == {4}


def test_stale_groups_are_handed_back_and_fresh_ones_stay() -> None:
    ready = buffer()
    ready.put(group(0, version=0))
    ready.put(group(1, version=1))
    assert [g.ticket for g in ready.discard_stale(learner_version=2)] == [0]
    assert ready.tickets == {1}


def test_taking_a_stale_group_is_an_error_and_loses_nothing() -> None:
    ready = buffer()
    ready.put(group(0, version=0))
    with pytest.raises(RuntimeError, match="discard_stale was not called"):
        ready.take(1, learner_version=2)
    assert len(ready) == 1


def test_a_group_delivered_twice_or_empty_is_an_error() -> None:
    ready = buffer()
    ready.put(group(0, version=0))
    with pytest.raises(RuntimeError, match="delivered twice"):
        ready.put(group(0, version=0))
    with pytest.raises(RuntimeError, match="no token"):
        ready.put(group(1, version=0, members=0))
