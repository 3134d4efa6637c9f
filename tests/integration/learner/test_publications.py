"""Weights go out while the next step computes, and are those of one version."""

import pytest

from ullim.learner.ranks import RankPlace

# Processes that import torch and transformers; on a crowded machine that alone can take a minute.
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("ranks", [1, 2])
def test_overlap(two_ranks, worker, models, ranks):
    first = two_ranks["overlap"][0] if ranks == 2 else worker.run("overlap", models, RankPlace())
    assert first["overlapped"], "the sender never saw the next step compute"
    assert first["of-version"], "the receiver got weights that are not those of the published version"
    assert first["then-moved"]
    assert str(first["failed"]) == "receiver lost"
    assert first["again"], "a publication after a failed one must be whole"


def test_other_ranks_see_no_error_of_the_sender(two_ranks):
    assert str(two_ranks["overlap"][1]["failed"]) == "None"
