import errno
from pathlib import Path

import pytest

from ullim.errors import BadInput, RunFailed
from ullim.monitor import files
from ullim.monitor.files import write_atomically
from ullim.monitor.run_directory import RunDirectory

CONFIG = {"run": {"name": "a"}, "loop": {"steps": 3}}


def test_create_then_open(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs" / "a", CONFIG)
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "config.toml", "samples", "tensorboard"]
    assert RunDirectory.open(run.path) == run
    assert run.read_config() == CONFIG


def test_a_directory_with_a_run_names_both_ways_out(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, CONFIG)
    with pytest.raises(BadInput, match=r"(?s)--resume.*--run\.dir"):
        RunDirectory.create(tmp_path, CONFIG)


def test_of_two_that_start_at_once_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunDirectory.create(tmp_path, CONFIG)
    monkeypatch.setattr(RunDirectory, "holds_run", lambda self: False)  # the other had not begun when we looked
    with pytest.raises(BadInput, match="already holds a run"):
        RunDirectory.create(tmp_path, {"run": {"name": "b"}})
    assert RunDirectory.open(tmp_path).read_config() == CONFIG


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    RunDirectory.create(tmp_path, CONFIG)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_in_the_way_is_bad_input(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"run\.dir"):
        RunDirectory.create(tmp_path / place, CONFIG)


def test_a_file_where_samples_should_be(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("")
    with pytest.raises(BadInput, match=r"samples is a file"):
        RunDirectory.create(tmp_path, CONFIG)


def test_open_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no run"):
        RunDirectory.open(tmp_path)
    with pytest.raises(BadInput, match="no such run directory"):
        RunDirectory.open(tmp_path / "gone")


def test_broken_config_is_named(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, CONFIG)
    run.config.write_text("a = ")
    with pytest.raises(BadInput, match=r"config\.toml"):
        run.read_config()


def test_a_resumed_run_keeps_each_former_config(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, {"steps": 1})
    run.replace_config({"steps": 1})
    assert not (tmp_path / "config-1.toml").exists()
    run.replace_config({"steps": 2})
    run.replace_config({"steps": 3})
    assert run.read_config() == {"steps": 3}
    assert (tmp_path / "config-1.toml").read_text() == "steps = 1\n"
    assert (tmp_path / "config-2.toml").read_text() == "steps = 2\n"


def test_a_failed_write_leaves_the_old_file_and_no_scraps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "sync_file", full)
    with pytest.raises(RunFailed, match=r"/a: cannot be written \(No space left on device\).*--resume"):
        write_atomically(path, lambda temporary: temporary.write_text("new") and None)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
