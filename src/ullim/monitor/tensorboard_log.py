"""Metrics as TensorBoard events, written through TensorBoard's own writer: no torch needed."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ullim.monitor.files import cannot_write

_FLUSH_S = 10  # what a crash may cost; metrics.jsonl, which loses nothing, is the record


class TensorBoardLog:
    """Scalars and histograms of one run in `folder`. A mapping from numbers to counts is a histogram; one with
    other keys is a scalar a key.

    `first_step` is the first step that will be written: events that an earlier, interrupted part of the run
    left at or after it are hidden by TensorBoard. Raises RunFailed when the disk refuses.
    """

    def __init__(self, folder: Path, *, first_step: int = 0) -> None:
        # Imported here: reading a run must not pay for TensorBoard.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder = folder
        continues = folder.is_dir() and any(folder.iterdir())
        try:
            self._writer = EventFileWriter(str(folder), flush_secs=_FLUSH_S)
            if continues:
                # TensorBoard drops what it read before from this step on, once a newer file says START.
                self._writer.add_event(Event(file_version="brain.Event:2", step=first_step))
                start = SessionLog(status=SessionLog.START)
                self._writer.add_event(Event(session_log=start, step=first_step))
        except OSError as error:
            raise cannot_write(folder, error) from error

    def write(self, step: int, wall_time: float, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of `step`. None is left out; NaN and infinities are kept, TensorBoard marks them."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = []
        for name, value in metrics.items():
            if not isinstance(value, Mapping):
                scalars = {name: value}
            elif all(isinstance(key, int | float) for key in value):
                values.append(Summary.Value(tag=name, histo=_histogram(value)))
                continue
            else:  # named parts, such as one number a node
                scalars = {f"{name}/{key}": part for key, part in value.items()}
            values += [Summary.Value(tag=tag, simple_value=float(v)) for tag, v in scalars.items() if v is not None]
        try:
            self._writer.add_event(Event(step=step, wall_time=wall_time, summary=Summary(value=values)))
        except OSError as error:
            raise cannot_write(self._folder, error) from error

    def close(self) -> None:
        """Write what is still in memory."""
        try:
            self._writer.close()
        except OSError as error:
            raise cannot_write(self._folder, error) from error


def _histogram(counts: Mapping[Any, float]) -> Any:
    """A TensorBoard histogram of {value: count}: one bucket a value, so that whole lags stay apart."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    pairs = sorted((float(value), float(count)) for value, count in counts.items() if count > 0)
    total = math.fsum(count for _, count in pairs)
    return HistogramProto(
        min=pairs[0][0] if pairs else 0.0,
        max=pairs[-1][0] if pairs else 0.0,
        num=total,
        sum=math.fsum(value * count for value, count in pairs),
        sum_squares=math.fsum(value * value * count for value, count in pairs),
        bucket_limit=[value for value, _ in pairs] or [0.0],
        bucket=[count for _, count in pairs] or [0.0],
    )
