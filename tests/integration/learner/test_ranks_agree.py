"""One rank or two, whole or cut: the same loss, the same gradients, the same weights afterwards."""

import numpy as np
import pytest

from ullim.learner.ranks import RankPlace

# Processes that import torch and transformers; on a crowded machine that alone can take a minute.
pytestmark = pytest.mark.timeout(900)

SAME = ["whole", "cut", "tied", "tied-cut-recomputed", "sequence-mean", "two-updates", "everything", "lone_sequence"]


@pytest.fixture(scope="module")
def alone(worker, models):
    """Each scenario on one rank in this process, run when first asked for."""
    known = {}

    def result(name):
        if name not in known:
            known[name] = worker.run(name, models, RankPlace())
        return known[name]

    return result


def assert_same(one, other, kind, tolerance):
    names = [name for name in one if name.startswith(kind)]
    assert names
    assert sorted(names) == sorted(name for name in other if name.startswith(kind))
    for name in names:
        scale = max(1e-3, float(np.abs(one[name]).max()))
        np.testing.assert_allclose(other[name], one[name], rtol=0, atol=tolerance * scale, err_msg=name)


@pytest.mark.parametrize("name", SAME)
def test_two_ranks_do_what_one_does(two_ranks, alone, name):
    one, first, second = alone(name), *two_ranks[name]
    assert_same(one, first, "metric/loss", 1e-5)
    assert_same(one, first, "metric/grad_norm", 1e-5)
    assert_same(one, first, "metric/entropy", 1e-5)
    assert_same(one, first, "metric/mismatch", 1e-4)
    assert_same(one, first, "metric/correction", 1e-5)
    assert_same(one, first, "metric/ratio", 1e-4)
    assert_same(one, first, "logprobs/", 1e-5)
    assert_same(one, first, "gradient/", 1e-5)
    assert_same(one, first, "weight/", 1e-4)  # AdamW turns a gradient of 0 ± rounding into a step of full length
    assert not any(name.startswith("logprobs/") for name in second), "sequence_logprobs are rank 0's to give"
    assert second["metric/loss"] == first["metric/loss"]


@pytest.mark.parametrize(("whole", "cut"), [("whole", "cut"), ("tied", "tied-cut-recomputed")])
def test_cutting_changes_nothing(alone, whole, cut):
    one, other = alone(whole), alone(cut)
    assert other["metric/learner/micro_batches"] > one["metric/learner/micro_batches"]
    assert_same(one, other, "metric/loss", 1e-5)
    assert_same(one, other, "metric/grad_norm", 1e-5)
    assert_same(one, other, "gradient/", 1e-5)


def test_the_scenarios_differ_and_the_gradients_are_not_nothing(alone):
    losses = {name: float(alone(name)["metric/loss"]) for name in SAME}
    assert len({round(loss, 7) for loss in losses.values()}) == len(SAME) - 2  # whole = cut, tied = tied-cut
    for name in SAME:
        assert 0.01 < float(alone(name)["metric/grad_norm"]) < 100


def test_a_prompt_is_computed_once_per_group(alone, worker):
    batch = worker.make_batch()
    prompts = {s.group: len(s.prompt_ids) for s in batch.sequences}
    fed = sum(len(s.token_ids) - 1 for s in batch.sequences)
    assert alone("whole")["metric/learner/input_tokens"] == sum(prompts.values()) + fed


def test_a_non_finite_loss_stops_all_ranks_together(two_ranks, alone):
    for result in (alone("bad_steps"), *two_ranks["bad_steps"]):
        assert "loss nan" in str(result["skipped"])
        assert result["version"] == 2, "a skipped step still makes a version"
        assert not result["moved"]
        assert result["finite"], "metrics must stay JSON"
        assert "2 steps in a row" in str(result["stopped"])
        assert "bad.jsonl" in str(result["stopped"])
