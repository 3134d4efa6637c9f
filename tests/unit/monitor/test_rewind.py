from pathlib import Path

import pytest

from ullim.errors import BadInput
from ullim.monitor.metrics import MetricsWriter, read_metrics
from ullim.monitor.recorder import SampleRecorder, read_samples
from ullim.monitor.rewind import rewind
from ullim.monitor.run_directory import RunDirectory


def make(path: Path, steps: int) -> RunDirectory:
    run = RunDirectory.create(path, {})
    recorder = SampleRecorder(run, [])
    with MetricsWriter(run, tensorboard=False) as metrics:
        for step in range(1, steps + 1):
            metrics.write(step, {"a": float(step)})
            recorder.write(step, [])
    return run


def sample_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_later_steps_are_moved_and_none_is_lost(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 4)
    moved = rewind(run, 3)
    assert (moved.metrics_rows, moved.sample_files, moved.folder) == (2, 2, run.replaced / "001")
    assert [row["step"] for row in read_metrics(run.path)] == [1, 2]
    assert [row["a"] for row in read_metrics(run.replaced / "001" / "metrics.jsonl")] == [3.0, 4.0]
    assert sample_steps(run.samples) == ["step-000001.parquet", "step-000002.parquet"]
    assert sample_steps(run.replaced / "001" / "samples") == ["step-000003.parquet", "step-000004.parquet"]
    with MetricsWriter(run, tensorboard=False) as metrics:
        metrics.write(3, {"a": 30.0})
    assert [row["a"] for row in read_metrics(run.path)] == [1.0, 2.0, 30.0]


def test_each_resume_has_a_folder_of_its_own(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 3)
    assert rewind(run, 3).folder == run.replaced / "001"
    assert rewind(run, 2).folder == run.replaced / "002"
    assert rewind(run, 2).folder is None  # nothing left to move
    assert [row["step"] for row in read_metrics(run.path)] == [1]


def test_back_to_the_very_start(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 2)
    rewind(run, 1)
    assert read_metrics(run.path) == []
    assert read_samples(run.path).num_rows == 0


def test_a_run_that_lives_is_not_rewound(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 2)
    with MetricsWriter(run, tensorboard=False), pytest.raises(BadInput, match="another process"):
        rewind(run, 1)
    assert len(read_metrics(run.path)) == 2
