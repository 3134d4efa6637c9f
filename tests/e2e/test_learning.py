"""The loop learns, asynchronously and in turn, and what it records is consistent.

Both runs are real: Ray, a node process with the embedded engine, a learner process with FSDP2, weights over gloo.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.compute as pc
import pytest
import torch
from toy import LETTERS, toy_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from ullim.config.load import check_recipe
from ullim.monitor.metrics import read_metrics
from ullim.monitor.recorder import read_samples
from ullim.orchestration.run import RunResult, train

STEPS = 40
MARGIN = 0.3  # of the final reward, between two ways to the same place that see different samples


@pytest.fixture(scope="module")
def async_run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    root = tmp_path_factory.mktemp("async")
    loop = {"mode": "async", "steps": STEPS, "max_staleness": 2}
    return train(check_recipe(toy_recipe(root, loop=loop, prompts={"heldout": 3}), "toy"))


@pytest.fixture(scope="module")
def sync_run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    root = tmp_path_factory.mktemp("sync")
    return train(check_recipe(toy_recipe(root, loop={"mode": "sync", "steps": STEPS, "max_staleness": 0}), "toy"))


def rewards(run: RunResult) -> list[float]:
    return [row["reward/fondness/mean"] for row in read_metrics(run.directory)]


def test_both_modes_learn_and_arrive_at_about_the_same_place(async_run: RunResult, sync_run: RunResult) -> None:
    for run in (async_run, sync_run):
        values = rewards(run)
        assert len(values) == STEPS
        assert fmean(values[:3]) < 0.2
        assert fmean(values[-5:]) > 0.6
    assert abs(fmean(rewards(async_run)[-5:]) - fmean(rewards(sync_run)[-5:])) < MARGIN


def test_held_out_prompts_are_answered_better_after_than_before(async_run: RunResult) -> None:
    assert async_run.before is not None
    assert async_run.after is not None
    before, after = async_run.before.rewards["fondness"], async_run.after.rewards["fondness"]
    assert before is not None
    assert after is not None
    assert after > before + 0.3
    assert [a.prompt_id for a in async_run.before.answers] == [a.prompt_id for a in async_run.after.answers]


def test_recorded_versions_lags_and_counts_agree(async_run: RunResult) -> None:
    samples = read_samples(async_run.directory)
    rows = read_metrics(async_run.directory)
    by_step: dict[int, list[dict[str, Any]]] = {}
    for sample in samples.to_pylist():
        by_step.setdefault(sample["step"], []).append(sample)
    assert sorted(by_step) == [row["step"] for row in rows] == list(range(1, STEPS + 1))
    tickets: list[int] = []
    for row in rows:
        answers = by_step[row["step"]]
        assert len(answers) == 6 * 8
        for answer in answers:
            learner_version = answer["step"] - 1
            assert answer["oldest_version"] == min(answer["versions"])
            assert answer["lag"] == learner_version - answer["oldest_version"]
            assert 0 <= answer["lag"] <= 2
            assert answer["versions"] == sorted(answer["versions"])
            assert max(answer["versions"]) <= learner_version
            assert len(answer["rollout_logprobs"]) == len(answer["learner_logprobs"]) == len(answer["token_ids"])
        assert row["staleness/max"] == max(a["lag"] for a in answers)
        assert row["staleness/mean"] == pytest.approx(fmean(a["lag"] for a in answers))
        assert sum(row["staleness/histogram"].values()) == len(answers)
        assert row["reward/fondness/mean"] == pytest.approx(fmean(a["score.fondness"] for a in answers))
        tickets += sorted({a["ticket"] for a in answers})
    assert len(tickets) == len(set(tickets)) == STEPS * 6
    # Every ticket was trained on or dropped as stale; nothing vanished in between.
    dropped = rows[-1]["staleness/dropped"]
    assert set(range(max(tickets) + 1)) >= set(tickets)
    assert max(tickets) + 1 - len(tickets) <= dropped / 8 + 2 * 6


def test_the_loop_runs_ahead_and_its_staleness_is_corrected(async_run: RunResult) -> None:
    rows = read_metrics(async_run.directory)
    assert max(row["staleness/max"] for row in rows) == 2
    assert any(row["mismatch/logprob_diff_mean"] > 1e-3 for row in rows)  # older policies differ
    assert any(row["correction/capped_fraction"] > 0 for row in rows)


def test_on_policy_log_probs_of_engine_and_learner_agree(sync_run: RunResult) -> None:
    for row in read_metrics(sync_run.directory):
        assert row["staleness/max"] == 0
        assert row["mismatch/logprob_diff_p99"] < 1e-4  # float32 on both sides, one version
        assert row["correction/capped_fraction"] == 0


def test_prompts_are_each_asked_once_an_epoch(async_run: RunResult) -> None:
    samples = read_samples(async_run.directory)
    positions = pc.unique(samples["prompt_position"]).to_pylist()
    assert len(positions) == STEPS * 6


def test_the_checkpoint_is_a_model_that_does_what_it_learned(async_run: RunResult) -> None:
    folder = async_run.checkpoint / "model"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for letter in LETTERS[:3]:
        text = tokenizer.apply_chat_template([{"role": "user", "content": letter}], tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        answer = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(answer, skip_special_tokens=True).count(letter) >= 4


def test_the_run_directory_is_complete(async_run: RunResult) -> None:
    directory: Path = async_run.directory
    assert (directory / "config.toml").is_file()
    assert len(list((directory / "samples").glob("step-*.parquet"))) == STEPS
    assert [path.name for path in (directory / "checkpoints").iterdir()] == [f"step-{STEPS:06d}"]
