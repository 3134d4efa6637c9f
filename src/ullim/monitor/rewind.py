"""Resuming: what a run wrote after its checkpoint is set aside, so that no step stands in the record twice."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullim.monitor.files import cannot_write, refuse_second_writer, write_atomically
from ullim.monitor.metrics import read_metrics
from ullim.monitor.recorder import sample_files
from ullim.monitor.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class Rewound:
    """What `rewind` moved: counts, and where to (None where there was nothing to move)."""

    metrics_rows: int
    sample_files: int
    folder: Path | None


def rewind(run: RunDirectory, first_step: int) -> Rewound:
    """Move metrics rows and sample files of steps >= `first_step`, the first that will be written again.

    They go to `replaced/NNN/` of the run directory; nothing is deleted. Call it before a MetricsWriter is
    opened. Safe to be cut short: the copy is made before the original shrinks, and a second call finishes.
    """
    try:
        with run.metrics.open("ab") as file:
            refuse_second_writer(file, run.metrics)
            return _move(run, first_step)
    except OSError as error:
        raise cannot_write(run.path, error) from error


def _move(run: RunDirectory, first_step: int) -> Rewound:
    rows = read_metrics(run.metrics)
    later = [row for row in rows if row["step"] >= first_step]
    files = [path for step, path in sample_files(run.samples) if step >= first_step]
    if not later and not files:
        return Rewound(0, 0, None)
    folder = _next_folder(run.replaced)
    if later:
        earlier = [row for row in rows if row["step"] < first_step]
        write_atomically(folder / "metrics.jsonl", lambda path: _write_rows(path, later))
        write_atomically(run.metrics, lambda path: _write_rows(path, earlier))
    for path in files:
        (folder / "samples").mkdir(exist_ok=True)
        os.replace(path, folder / "samples" / path.name)
    return Rewound(len(later), len(files), folder)


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n" for row in rows)
    path.write_bytes(text.encode())


def _next_folder(parent: Path) -> Path:
    parent.mkdir(exist_ok=True)
    number = 1 + max((int(path.name) for path in parent.iterdir() if path.name.isdigit()), default=0)
    folder = parent / f"{number:03d}"
    folder.mkdir()
    return folder
