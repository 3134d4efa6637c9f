"""metrics.jsonl: one strict JSON object a step, safe to read while it is written and after a crash.

A row is flat: `step`, `time` (Unix seconds), every metric under its own name, and `nonfinite` where a metric was
NaN or infinite. JSON has neither, so such a metric is null and its name stands in that list. A metric that could
not be measured (None) is null and not in the list. A histogram is an object from value to count.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ullim.errors import BadInput, UllimError
from ullim.monitor.files import cannot_write, refuse_second_writer
from ullim.monitor.run_directory import RunDirectory
from ullim.monitor.tensorboard_log import TensorBoardLog

Metric = float | None | Mapping[Any, float]
_RESERVED = frozenset({"step", "time", "nonfinite"})


class MetricsWriter:
    """Appends rows to a run's metrics.jsonl and TensorBoard events.

    Each row is on the disk when `write` returns. One process writes a run at a time; a second is refused with
    BadInput. Steps must rise: `rewind` a run before resuming it at an earlier step.
    """

    def __init__(
        self, run: RunDirectory, *, tensorboard: bool = True, wall_time: Callable[[], float] = time.time
    ) -> None:
        self._path = run.metrics
        self._wall_time = wall_time
        try:
            self._file = open(run.metrics, "ab", buffering=0)  # noqa: SIM115  (closed by close)
        except OSError as error:
            raise cannot_write(run.metrics, error) from error
        try:
            refuse_second_writer(self._file, run.metrics)
            kept = self._drop_torn_line()
        except UllimError:
            self._file.close()
            raise
        self._last_step = kept[-1]["step"] if kept else -1
        self._tensorboard = TensorBoardLog(run.tensorboard, first_step=self._last_step + 1) if tensorboard else None

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Add the row of `step`.

        Raises ValueError for a step that does not rise or a reserved name, TypeError for a value that is no
        number, RunFailed when the disk refuses.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} after step {self._last_step}: rewind the run before writing a step again")
        now = self._wall_time()
        line = json.dumps(_row(step, now, metrics), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        self._append(line.encode() + b"\n")
        self._last_step = step
        if self._tensorboard is not None:
            self._tensorboard.write(step, now, metrics)

    def close(self) -> None:
        """Flush and close both outputs; a second call does nothing."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):  # a raw write may take only a part
                written += self._file.write(data[written:])
            os.fsync(self._file.fileno())
        except OSError as error:
            raise cannot_write(self._path, error) from error

    def _drop_torn_line(self) -> list[dict[str, Any]]:
        """Remove a line that a crash cut short, or the next row would be glued to it."""
        rows, whole = _parse(self._path)
        if whole < self._path.stat().st_size:
            os.truncate(self._path, whole)
        elif rows and not self._path.read_bytes().endswith(b"\n"):
            self._append(b"\n")
        return rows


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl (or of the run directory that holds it), in order.

    A last line cut short by a crash, or not yet fully written, is left out. BadInput names file and line of
    anything else that is no strict JSON object with a step; a run that has no row yet gives [].
    """
    path = Path(path)
    if path.is_dir():
        path = RunDirectory.open(path).metrics
        if not path.exists():
            return []
    return _parse(path)[0]


def _row(step: int, now: float, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    if reserved := _RESERVED & metrics.keys():
        raise ValueError(f"{', '.join(sorted(reserved))}: reserved, choose another name for the metric")
    nonfinite: list[str] = []
    row: dict[str, Any] = {"step": int(step), "time": now}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            row[name] = {str(key): _number(f"{name}/{key}", item, nonfinite) for key, item in value.items()}
        else:
            row[name] = _number(name, value, nonfinite)
    if nonfinite:
        row["nonfinite"] = nonfinite
    return row


def _number(name: str, value: object, nonfinite: list[str]) -> int | float | None:
    """A JSON number; numpy's and torch's scalars are taken through `item`."""
    if hasattr(value, "item"):
        value = value.item()
    match value:
        case None:
            return None
        case bool():
            return int(value)
        case int():
            return value
        case float():
            if math.isfinite(value):
                return value
            nonfinite.append(name)
            return None
    raise TypeError(f"metric {name}: expected a number, got {value!r}")


def _parse(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Rows, and how many bytes of the file they fill; bytes beyond are a torn last line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror or error})") from error
    rows = []
    whole = 0
    *lines, tail = data.split(b"\n")
    for number, line in enumerate([*(line + b"\n" for line in lines), *([tail] if tail else [])], start=1):
        try:
            row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
            if not (isinstance(row, dict) and isinstance(row.get("step"), int)):
                raise ValueError("no object with an integer `step`")
        except ValueError as error:
            if not line.endswith(b"\n"):  # only the last line can lack its end: a crash cut it
                break
            raise BadInput(f"{path}, line {number}: not a metrics row ({error})") from None
        rows.append(row)
        whole += len(line)
    return rows, whole


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
