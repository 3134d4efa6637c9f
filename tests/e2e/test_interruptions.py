"""Runs that are interrupted: by their end and a resume, by a killed node, by rewards that never work."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyarrow.compute as pc
import pytest
from toy import toy_recipe

from ullim.config.load import check_recipe
from ullim.config.run import Recipe
from ullim.errors import BadInput, RunFailed
from ullim.monitor.metrics import read_metrics
from ullim.monitor.recorder import read_samples
from ullim.orchestration.run import train


def recipe(root: Path, **sections: dict[str, object]) -> Recipe:
    return check_recipe(toy_recipe(root, **sections), "toy")


@contextmanager
def killing(name: str, run: Path, *, after_steps: int) -> Iterator[list[int]]:
    """Kill one process of this session by `name` once the run has taken some steps; yields whom it killed."""
    killed: list[int] = []
    over = threading.Event()

    def wait_and_kill() -> None:
        while not over.wait(0.02):
            if (run / "metrics.jsonl").is_file() and len(read_metrics(run)) >= after_steps:
                for process in psutil.Process().children(recursive=True):
                    if process.name().startswith(name):
                        killed.append(process.pid)
                        process.kill()
                        return

    killer = threading.Thread(target=wait_and_kill)
    killer.start()
    try:
        yield killed
    finally:
        over.set()
        killer.join()


def test_a_resumed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    train(recipe(tmp_path, loop={"steps": 3}))
    with pytest.raises(BadInput, match="--resume"):
        train(recipe(tmp_path, loop={"steps": 6}))
    result = train(recipe(tmp_path, loop={"steps": 6}), resume=True)
    assert result.version == 6
    rows = read_metrics(result.directory)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    positions = pc.unique(read_samples(result.directory)["prompt_position"]).to_pylist()
    assert sorted(positions) == list(range(36))  # none twice, none skipped
    versions = read_samples(result.directory, steps=[4]).column("oldest_version").to_pylist()
    assert set(versions) == {3}  # answered by the resumed weights, not by the starting model


def test_a_killed_node_comes_back_and_nothing_is_lost(tmp_path: Path) -> None:
    settings = recipe(tmp_path, nodes={"count": 2, "threads": 1}, loop={"steps": 40, "watchdog_s": 90.0})
    with killing("ray::InferenceN", tmp_path / "run", after_steps=3) as killed:
        result = train(settings)
    assert killed, "no node process was found to kill"
    assert [row["step"] for row in read_metrics(result.directory)] == list(range(1, 41))
    samples = read_samples(result.directory)
    assert len(pc.unique(samples["ticket"])) == 40 * 6
    assert len(pc.unique(samples["prompt_position"])) == 40 * 6
    assert max(samples["lag"].to_pylist()) <= 2


def test_a_killed_learner_takes_the_run_back_to_its_checkpoint(tmp_path: Path) -> None:
    settings = recipe(tmp_path, loop={"steps": 12}, checkpoint={"every": 4})
    with killing("ray::LearnerRan", tmp_path / "run", after_steps=5) as killed:
        result = train(settings)
    assert killed, "no learner process was found to kill"
    assert [row["step"] for row in read_metrics(result.directory)] == list(range(1, 13))
    positions = pc.unique(read_samples(result.directory)["prompt_position"]).to_pylist()
    assert sorted(positions) == list(range(72))  # each prompt once, though steps were taken twice


def test_rewards_that_never_work_end_the_run_with_their_reason(tmp_path: Path) -> None:
    broken = {"fondness": {"kind": "function", "function": "toy:unlucky", "retries": 0}}
    with pytest.raises(RunFailed, match="scoring service is down"):
        train(recipe(tmp_path, rewards=broken, loop={"max_empty_steps": 2}))
    # It ended before its first checkpoint; mended and resumed, it begins again in the same directory.
    assert train(recipe(tmp_path, loop={"steps": 2}), resume=True).version == 2


def test_a_reward_function_that_does_not_exist_is_refused_before_anything_starts(tmp_path: Path) -> None:
    missing = {"fondness": {"kind": "function", "function": "toy:nothing"}}
    with pytest.raises(BadInput, match=r"rewards\.fondness\.function"):
        train(recipe(tmp_path, rewards=missing))
    assert not (tmp_path / "run").exists()


def test_prompts_that_are_all_too_long_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="prompts are longer than"):
        train(recipe(tmp_path, prompts={"max_tokens": 1}))
    assert not (tmp_path / "run").exists()
