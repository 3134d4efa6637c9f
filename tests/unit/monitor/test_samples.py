from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ullim.errors import BadInput, RunFailed
from ullim.monitor.recorder import SampleRecorder, read_samples
from ullim.monitor.run_directory import RunDirectory
from ullim.monitor.samples import SampleRow, rows_from_groups
from ullim.records import Completion, Message, Prompt, RolloutGroup, Score


def group(ticket: int = 7) -> RolloutGroup:
    prompt = Prompt("p-1", 40, (Message("system", "짧게"), Message("user", "안녕?")), np.array([1, 2], np.int32))
    whole = Completion(
        token_ids=np.array([5, 6, 7], np.int32),
        logprobs=np.array([-0.5, np.nan, -0.25], np.float32),
        versions=np.array([3, 3, 4], np.int32),
        finish="stop",
        text="네 안녕",
        scores={"length": Score(0.5), "judge": Score(None, "timeout")},
    )
    nothing = np.array([], np.int32)
    empty = Completion(nothing, nothing.astype(np.float32), nothing, "aborted", "")
    return RolloutGroup(ticket, prompt, (whole, empty), node="node-0")


def rows() -> list[SampleRow]:
    return rows_from_groups(
        [group()],
        learner_version=5,
        advantages={(7, 0): -1.5},
        channel_advantages={(7, 0): {"length": -0.75}},
        learner_logprobs={(7, 0): np.array([-0.5, -1, -0.125], np.float32)},
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", {})


def test_every_column_of_a_trained_and_of_an_empty_completion(run: RunDirectory) -> None:
    SampleRecorder(run, ["length", "judge"]).write(12, rows())
    table = read_samples(run.path)
    first, second = table.to_pylist()
    assert np.isnan(first["rollout_logprobs"][1])
    first["rollout_logprobs"][1] = None
    assert first == {
        "step": 12,
        "ticket": 7,
        "prompt_position": 40,
        "prompt_id": "p-1",
        "member": 0,
        "messages": [{"role": "system", "content": "짧게"}, {"role": "user", "content": "안녕?"}],
        "prompt_token_ids": [1, 2],
        "text": "네 안녕",
        "length": 3,
        "token_ids": [5, 6, 7],
        "rollout_logprobs": [-0.5, None, -0.25],
        "learner_logprobs": [-0.5, -1.0, -0.125],
        "versions": [3, 3, 4],
        "finish": "stop",
        "oldest_version": 3,
        "lag": 2,
        "node": "node-0",
        "trained": True,
        "advantage": -1.5,
        "score.length": 0.5,
        "score_reason.length": None,
        "advantage.length": -0.75,
        "score.judge": None,
        "score_reason.judge": "timeout",
        "advantage.judge": None,
    }
    assert second["member"] == 1
    assert (second["length"], second["token_ids"], second["finish"], second["trained"]) == (0, [], "aborted", False)
    for column in ("learner_logprobs", "oldest_version", "lag", "advantage", "score.length", "score_reason.length"):
        assert second[column] is None
    types = {field.name: str(field.type) for field in table.schema}
    assert types["token_ids"] == "list<element: int32>"
    assert types["rollout_logprobs"] == "list<element: float>"


def test_trained_can_be_named_apart_from_having_an_advantage() -> None:
    row = rows_from_groups([group()], learner_version=5, advantages={(7, 0): 1.0}, trained=())[0]
    assert (row.trained, row.advantage) == (False, 1.0)


def test_log_probs_of_another_member_are_noticed() -> None:
    with pytest.raises(ValueError, match="ticket 7, member 0: 2 learner log-probs for 3 tokens"):
        rows_from_groups(
            [group()], learner_version=5, advantages={}, learner_logprobs={(7, 0): np.zeros(2, np.float32)}
        )


def test_redaction_reaches_every_text_and_no_ids_give_it_away(run: RunDirectory) -> None:
    SampleRecorder(run, ["length", "judge"], redact=lambda text: text.replace("안녕", "*")).write(1, rows())
    table = read_samples(run.path)
    row = table.to_pylist()[0]
    assert row["text"] == "네 *"
    assert [message["content"] for message in row["messages"]] == ["짧게", "*?"]
    assert row["token_ids"] is None
    assert row["prompt_token_ids"] is None
    assert row["length"] == 3
    assert "안녕".encode() not in (run.samples / "step-000001.parquet").read_bytes()


def test_a_redaction_that_fails_writes_nothing(run: RunDirectory) -> None:
    with pytest.raises(RunFailed, match=r"monitor\.redact raised ZeroDivisionError"):
        SampleRecorder(run, ["length", "judge"], redact=lambda text: str(1 // 0)).write(1, rows())
    with pytest.raises(RunFailed, match="must return a str, got NoneType"):
        SampleRecorder(run, ["length", "judge"], redact=lambda text: None).write(1, rows())  # type: ignore[arg-type,return-value]
    assert list(run.samples.iterdir()) == []


def test_an_unknown_channel_is_an_error(run: RunDirectory) -> None:
    with pytest.raises(ValueError, match="unknown channel judge; the run has length"):
        SampleRecorder(run, ["length"]).write(1, rows())


def test_reading_chosen_steps_in_order(run: RunDirectory) -> None:
    recorder = SampleRecorder(run, ["length", "judge"])
    for step in (10, 2, 1_000_000):
        recorder.write(step, rows())
    assert read_samples(run.path).column("step").to_pylist() == [2, 2, 10, 10, 1_000_000, 1_000_000]
    assert read_samples(run.path, steps=[10, 11]).column("step").to_pylist() == [10, 10]


def test_no_samples_yet_and_a_step_without_any(run: RunDirectory) -> None:
    assert read_samples(run.path).num_rows == 0
    SampleRecorder(run, ["length"]).write(1, [])
    assert "score.length" in read_samples(run.path).column_names


def test_a_channel_added_on_resume_is_null_before(run: RunDirectory) -> None:
    SampleRecorder(run, ["length", "judge"]).write(1, rows())
    SampleRecorder(run, ["length", "judge", "new"]).write(2, rows())
    assert read_samples(run.path).column("score.new").to_pylist() == [None] * 4


def test_lone_surrogates_do_not_end_a_run(run: RunDirectory) -> None:
    odd = Prompt("p", 0, (Message("user", "a\ud800b"),), np.array([1], np.int32))
    SampleRecorder(run, []).write(
        1, rows_from_groups([RolloutGroup(1, odd, (), "n")], learner_version=0, advantages={})
    )
    completion = Completion(np.array([1], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop", "x")
    made = rows_from_groups([RolloutGroup(1, odd, (completion,), "n")], learner_version=0, advantages={})
    SampleRecorder(run, []).write(2, made)
    assert read_samples(run.path).to_pylist()[0]["messages"][0]["content"] == "a?b"


def test_a_broken_file_is_named(run: RunDirectory) -> None:
    (run.samples / "step-000001.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(BadInput, match=r"step-000001\.parquet"):
        read_samples(run.path)


def test_a_file_written_halfway_never_shows(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(table: object, path: Path, **_: object) -> None:
        Path(path).write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", half)
    with pytest.raises(RunFailed, match=r"step-000001\.parquet: cannot be written"):
        SampleRecorder(run, ["length", "judge"]).write(1, rows())
    assert list(run.samples.iterdir()) == []
