"""A checkpoint of a run is complete or absent, whenever the writing stops."""

import asyncio
import json
from pathlib import Path
from typing import cast

import pytest

from ullim.errors import BadInput
from ullim.orchestration.checkpoints import Checkpoints
from ullim.orchestration.peers import Learners


class Writers:
    """Learners that write one file, or fail in the middle of it."""

    def __init__(self, text: str = "weights", *, fail: bool = False) -> None:
        self.text = text
        self.fail = fail

    async def save(self, directory: Path) -> None:
        (directory / "model").write_text(self.text, encoding="utf-8")
        if self.fail:
            raise OSError("no space left on device")


def state(version: int) -> dict[str, object]:
    return {"version": version, "gate": {}, "stream": {}, "counters": {}}


def write(checkpoints: Checkpoints, step: int, writers: Writers | None = None) -> Path:
    return asyncio.run(checkpoints.write(step, state(step), cast(Learners, writers or Writers())))


def test_the_newest_is_the_one_of_the_highest_step_and_only_k_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (2, 999_999, 1_000_000):
        write(checkpoints, step)
    assert [path.name for _, path in checkpoints.all()] == ["step-999999", "step-1000000"]
    assert Checkpoints.state(checkpoints.newest())["version"] == 1_000_000


def test_a_write_that_fails_leaves_the_former_one_as_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    former = write(checkpoints, 1)
    with pytest.raises(OSError, match="no space"):
        write(checkpoints, 2, Writers(fail=True))
    assert checkpoints.newest() == former
    write(checkpoints, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]  # what was left half-done is gone


def test_a_state_that_cannot_be_written_makes_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    with pytest.raises(ValueError, match="not JSON compliant"):
        asyncio.run(checkpoints.write(1, state(1) | {"loss": float("nan")}, cast(Learners, Writers())))
    assert checkpoints.all() == []


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 1, Writers("old"))
    path = write(checkpoints, 1, Writers("new"))
    assert (path / "model").read_text(encoding="utf-8") == "new"


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    (tmp_path / "unfinished-000001").mkdir()
    (tmp_path / "step-000001").mkdir()  # without its state it is not one
    with pytest.raises(BadInput, match="no complete checkpoint"):
        Checkpoints(tmp_path, keep=1).newest()
    with pytest.raises(BadInput, match="no complete checkpoint"):
        Checkpoints(tmp_path / "nowhere", keep=1).newest()


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"version": 1})])
def test_a_state_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    path = write(Checkpoints(tmp_path, keep=1), 1)
    (path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match=r"run\.json: .*to resume from the one before"):
        Checkpoints.state(path)
