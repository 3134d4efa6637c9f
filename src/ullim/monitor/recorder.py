"""Samples to Parquet, one file a step: what was asked, answered, scored and trained on."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ullim.errors import BadInput, RunFailed
from ullim.monitor.files import write_atomically
from ullim.monitor.run_directory import RunDirectory
from ullim.monitor.samples import SampleRow

Redact = Callable[[str], str]
_FILE_NAME = re.compile(r"step-(\d+)\.parquet")
_SCHEMA_VERSION = "1"


class SampleRecorder:
    """Writes the samples of a step as `samples/step-000012.parquet`, whole or not at all.

    `redact` (str -> str) is applied to every answer and every message. Token ids decode to the text they came
    from, so with a redaction they are not written (null); lengths, log-probs and versions are.
    """

    def __init__(self, run: RunDirectory, channels: Sequence[str], *, redact: Redact | None = None) -> None:
        self._folder = run.samples
        self._schema = sample_schema(channels)
        self._channels = tuple(channels)
        self._redact = redact

    def write(self, step: int, rows: Sequence[SampleRow]) -> Path:
        """Write the rows of `step`; gives the file's path.

        Raises RunFailed when the disk refuses or the redaction raises or gives no string (nothing is written
        then), ValueError for a score of a channel that the recorder was not made with.
        """
        table = pa.Table.from_pylist([self._columns(step, row) for row in rows], schema=self._schema)
        path = self._folder / f"step-{step:06d}.parquet"
        write_atomically(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))
        return path

    def _columns(self, step: int, row: SampleRow) -> dict[str, Any]:
        if unknown := (row.scores.keys() | row.channel_advantages.keys()) - set(self._channels):
            raise ValueError(f"unknown channel {', '.join(sorted(unknown))}; the run has {', '.join(self._channels)}")
        columns: dict[str, Any] = {
            "step": step,
            "ticket": row.ticket,
            "prompt_position": row.prompt_position,
            "prompt_id": _encodable(row.prompt_id),
            "member": row.member,
            "messages": [{"role": message.role, "content": self._text(message.content)} for message in row.messages],
            "prompt_token_ids": None if self._redact else row.prompt_token_ids,
            "text": self._text(row.text),
            "length": len(row.token_ids),
            "token_ids": None if self._redact else row.token_ids,
            "rollout_logprobs": row.rollout_logprobs,
            "learner_logprobs": row.learner_logprobs,
            "versions": row.versions,
            "finish": row.finish,
            "oldest_version": row.oldest_version,
            "lag": row.lag,
            "node": row.node,
            "trained": row.trained,
            "advantage": row.advantage,
        }
        for channel in self._channels:
            score = row.scores.get(channel)
            columns[f"score.{channel}"] = None if score is None else score.value
            columns[f"score_reason.{channel}"] = None if score is None else score.reason
            columns[f"advantage.{channel}"] = row.channel_advantages.get(channel)
        return columns

    def _text(self, text: str) -> str:
        if self._redact is None:
            return _encodable(text)
        try:
            redacted = self._redact(text)
        except Exception as error:  # a user's function may raise anything; text it did not clear is never written
            raise RunFailed(f"monitor.redact raised {type(error).__name__}: {error}; no sample was written") from error
        if not isinstance(redacted, str):
            raise RunFailed(f"monitor.redact must return a str, got {type(redacted).__name__}; no sample was written")
        return _encodable(redacted)


def sample_schema(channels: Iterable[str]) -> pa.Schema:
    """Columns of a sample file for a run with these reward channels."""
    ids, floats = pa.list_(pa.int32()), pa.list_(pa.float32())
    fields = [
        ("step", pa.int64()),
        ("ticket", pa.int64()),
        ("prompt_position", pa.int64()),
        ("prompt_id", pa.string()),
        ("member", pa.int32()),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("prompt_token_ids", ids),
        ("text", pa.string()),
        ("length", pa.int32()),
        ("token_ids", ids),
        ("rollout_logprobs", floats),
        ("learner_logprobs", floats),
        ("versions", ids),
        ("finish", pa.string()),
        ("oldest_version", pa.int64()),
        ("lag", pa.int64()),
        ("node", pa.string()),
        ("trained", pa.bool_()),
        ("advantage", pa.float64()),
    ]
    for channel in channels:
        fields += [
            (f"score.{channel}", pa.float64()),
            (f"score_reason.{channel}", pa.string()),
            (f"advantage.{channel}", pa.float64()),
        ]
    return pa.schema(fields, metadata={"ullim.samples": _SCHEMA_VERSION})


def sample_files(folder: Path) -> list[tuple[int, Path]]:
    """(step, file) of every sample file in `folder`, by step; [] where there is no folder."""
    if not folder.is_dir():
        return []
    matches = ((_FILE_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def read_samples(run_dir: Path | str, steps: Iterable[int] | None = None) -> pa.Table:
    """The samples of a run as one table, by step; of all recorded steps, or of those in `steps` that were recorded.

    A run without samples gives a table with the fixed columns and no rows. BadInput names a directory that
    holds no run, and a file that cannot be read.
    """
    wanted = None if steps is None else set(steps)
    tables = []
    for step, path in sample_files(RunDirectory.open(run_dir).samples):
        if wanted is None or step in wanted:
            try:
                tables.append(pq.read_table(path))
            except (OSError, pa.ArrowInvalid) as error:
                raise BadInput(f"{path}: not a readable Parquet file ({error})") from error
    if not tables:
        return sample_schema(()).empty_table()
    return pa.concat_tables(tables, promote_options="default")


def _encodable(text: str) -> str:
    """`text` without lone surrogates, which JSON input can smuggle in and UTF-8, hence Parquet, cannot hold."""
    return text.encode("utf-8", "replace").decode("utf-8")
