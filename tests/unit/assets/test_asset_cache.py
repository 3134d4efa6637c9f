import os
import threading
import time
from pathlib import Path

import pytest

from ullim.assets.cache import build_once, cache_dir
from ullim.errors import BadInput


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ULLIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("ULLIM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "ullim"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_dir() == Path.home() / ".cache" / "ullim"


def test_a_thing_is_made_once(cache: Path) -> None:
    built: list[Path] = []

    def build(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        (folder / "file").write_text("content")
        built.append(folder)

    assert build_once("thing-1", build) == build_once("thing-1", build) == cache / "thing-1"
    assert len(built) == 1
    assert [entry.name for entry in cache.iterdir()] == ["thing-1"]


def test_a_build_that_fails_leaves_nothing_and_may_be_tried_again(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once("thing", fail)
    assert list(cache.iterdir()) == []
    assert build_once("thing", lambda folder: None).is_dir()


def test_two_that_begin_together_end_with_one_whole_thing(cache: Path) -> None:
    both_building = threading.Barrier(2, timeout=60)
    results: list[Path] = []

    def build(folder: Path) -> None:
        both_building.wait()
        (folder / "file").write_text("whole")

    threads = [threading.Thread(target=lambda: results.append(build_once("thing", build))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [cache / "thing"] * 2
    assert (cache / "thing" / "file").read_text() == "whole"
    assert [entry.name for entry in cache.iterdir()] == ["thing"]


def test_what_killed_builds_left_is_swept_after_a_day(cache: Path) -> None:
    old, young = cache / ".building-a-1", cache / ".building-b-2"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "half").write_text("x")
    long_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    build_once("thing", lambda folder: None)
    assert {entry.name for entry in cache.iterdir()} == {young.name, "thing"}


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ULLIM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(BadInput, match=r"cannot be written .* set ULLIM_CACHE"):
        build_once("thing", lambda folder: None)
