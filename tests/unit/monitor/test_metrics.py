import json
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ullim.errors import BadInput, RunFailed
from ullim.monitor.metrics import MetricsWriter, read_metrics
from ullim.monitor.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", {})


def writer(run: RunDirectory, *, tensorboard: bool = False) -> MetricsWriter:
    return MetricsWriter(run, tensorboard=tensorboard, wall_time=lambda: 1.5)


def refuse(name: str) -> float:
    raise AssertionError(f"{name} is not strict JSON")


def test_a_row_is_flat_strict_json(run: RunDirectory) -> None:
    with writer(run) as metrics:
        metrics.write(
            3,
            {
                "entropy": np.float32(0.5),
                "loss": math.nan,
                "grad_norm": -math.inf,
                "tokens": torch.tensor(7),
                "reward/x/std": None,
                "staleness/histogram": {0: 5, 1: np.int64(3)},
                "utilisation/node": {"a": math.inf},
            },
        )
    line = run.metrics.read_text()
    assert line.endswith("}\n")
    assert json.loads(line, parse_constant=refuse) == {
        "step": 3,
        "time": 1.5,
        "entropy": 0.5,
        "loss": None,
        "grad_norm": None,
        "tokens": 7,
        "reward/x/std": None,
        "staleness/histogram": {"0": 5, "1": 3},
        "utilisation/node": {"a": None},
        "nonfinite": ["loss", "grad_norm", "utilisation/node/a"],
    }


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=10).filter(
    lambda name: name not in {"step", "time", "nonfinite"}
)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(names, st.floats() | st.integers() | st.none(), max_size=6))
def test_rows_come_back_as_written(tmp_path_factory: pytest.TempPathFactory, metrics: dict[str, float | None]) -> None:
    run = RunDirectory.create(tmp_path_factory.mktemp("property") / "run", {})
    with writer(run) as out:
        out.write(1, metrics)
        out.write(2, metrics)
    rows = read_metrics(run.metrics)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        for name, value in metrics.items():
            finite = value is not None and math.isfinite(value)
            assert row[name] == (value if finite else None)
            assert (name in row.get("nonfinite", [])) == (value is not None and not finite)


def test_steps_must_rise_and_names_be_free(run: RunDirectory) -> None:
    with writer(run) as metrics:
        metrics.write(2, {})
        with pytest.raises(ValueError, match="step 2 after step 2"):
            metrics.write(2, {})
        with pytest.raises(ValueError, match="nonfinite: reserved"):
            metrics.write(3, {"nonfinite": 1.0})
        with pytest.raises(TypeError, match="metric loss"):
            metrics.write(3, {"loss": "high"})  # type: ignore[dict-item]
    with writer(run) as metrics, pytest.raises(ValueError, match="rewind"):
        metrics.write(1, {})


def test_every_way_a_crash_can_cut_the_last_line(run: RunDirectory) -> None:
    with writer(run) as metrics:
        metrics.write(1, {"a": 1.0})
        metrics.write(2, {"가": 2.0})
    data = run.metrics.read_bytes()
    first = data.index(b"\n") + 1
    for cut in range(first, len(data)):  # also in the middle of a letter of three bytes
        run.metrics.write_bytes(data[:cut])
        whole = 2 if cut == len(data) - 1 else 1  # only the newline is missing: the row is complete
        assert [row["step"] for row in read_metrics(run.path)] == [1, 2][:whole]
        with writer(run) as metrics:
            metrics.write(9, {})
        assert [row["step"] for row in read_metrics(run.path)] == [*[1, 2][:whole], 9]


def test_zeros_that_a_power_cut_left_are_a_torn_line(run: RunDirectory) -> None:
    run.metrics.write_bytes(b'{"step":1}\n' + bytes(100))
    assert read_metrics(run.metrics) == [{"step": 1}]


@pytest.mark.parametrize("bad", ['{"step":2,"a":NaN}', "[1]", '{"a":1}', "{", "a\rb"])
def test_a_broken_line_within_the_file_is_named(run: RunDirectory, bad: str) -> None:
    run.metrics.write_text(f'{{"step":1}}\n{bad}\n{{"step":3}}\n')
    with pytest.raises(BadInput, match=r"metrics\.jsonl, line 2"):
        read_metrics(run.metrics)


def test_no_rows_yet(run: RunDirectory, tmp_path: Path) -> None:
    assert read_metrics(run.path) == []
    with pytest.raises(BadInput, match=r"gone\.jsonl: cannot be read"):
        read_metrics(tmp_path / "gone.jsonl")


def test_a_second_writer_is_refused(run: RunDirectory) -> None:
    with writer(run) as metrics:
        with pytest.raises(BadInput, match="another process is writing this run"):
            writer(run)
        metrics.write(1, {})
    with writer(run) as metrics:
        metrics.write(2, {})


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """A disk that takes `size` bytes of a file and then no more: writes come back short, then fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_the_run_clearly_and_it_can_go_on(run: RunDirectory) -> None:
    with writer(run) as metrics:
        metrics.write(1, {"a": 1.0})
        size = run.metrics.stat().st_size
        with file_size_limit(size + 10), pytest.raises(RunFailed, match=r"metrics\.jsonl: cannot be written"):
            metrics.write(2, {"a": 2.0})
    assert run.metrics.stat().st_size == size + 10  # a torn line is really there
    with writer(run) as metrics:
        metrics.write(2, {"a": 3.0})
    assert [row["a"] for row in read_metrics(run.path)] == [1.0, 3.0]


def tensorboard(run: RunDirectory) -> EventAccumulator:
    events = EventAccumulator(str(run.tensorboard), size_guidance={"tensors": 0, "scalars": 0, "histograms": 0})
    events.Reload()
    return events


def test_tensorboard_has_scalars_and_histograms(run: RunDirectory) -> None:
    with writer(run, tensorboard=True) as metrics:
        metrics.write(
            1, {"entropy": 0.5, "none": None, "staleness/histogram": {0: 5, 2: 3}, "utilisation/node": {"n0": 0.25}}
        )
    events = tensorboard(run)
    assert set(events.Tags()["scalars"]) == {"entropy", "utilisation/node/n0"}
    (scalar,) = events.Scalars("entropy")
    assert (scalar.step, scalar.value, scalar.wall_time) == (1, 0.5, 1.5)
    (histogram,) = events.Histograms("staleness/histogram")
    value = histogram.histogram_value
    assert (value.min, value.max, value.num, value.sum, value.sum_squares) == (0, 2, 8, 6, 12)
    assert (list(value.bucket_limit), list(value.bucket)) == ([0, 2], [5, 3])


def test_tensorboard_hides_what_a_resumed_run_writes_again(run: RunDirectory) -> None:
    with writer(run, tensorboard=True) as metrics:
        for step in (1, 2, 3):
            metrics.write(step, {"a": float(step)})
    run.metrics.write_text("".join(run.metrics.read_text().splitlines(keepends=True)[:1]))  # back to step 1
    # Event files sort by name; a second one within the same second and process is told apart by its counter.
    with writer(run, tensorboard=True) as metrics:
        metrics.write(2, {"a": 20.0})
    assert [(event.step, event.value) for event in tensorboard(run).Scalars("a")] == [(1, 1.0), (2, 20.0)]
