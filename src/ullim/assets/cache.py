"""A folder that is made once: complete or absent, whatever is killed and however many processes ask at once."""

import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from ullim.errors import BadInput

_ABANDONED_AFTER_S = 24 * 3600.0
_BUILDING = ".building-"


def cache_dir() -> Path:
    """$ULLIM_CACHE, else $XDG_CACHE_HOME/ullim, else ~/.cache/ullim."""
    if own := os.environ.get("ULLIM_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ullim"


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """The cached folder `name`, made by `build(empty folder)` where it is not there yet.

    The work is done beside the final place and renamed into it, so that a reader never sees half of it. Two
    processes that begin together both build and the slower one throws its work away: dearer than a lock, and
    unlike a lock never left behind by a process that died. `name` must change whenever the content would.
    """
    final = cache_dir() / name
    if final.is_dir():
        return final
    working = final.parent / f"{_BUILDING}{name}-{uuid.uuid4().hex}"
    try:
        working.mkdir(parents=True)
        _sweep(final.parent)
    except OSError as error:
        raise BadInput(f"the cache folder {final.parent} cannot be written ({error}); set ULLIM_CACHE") from error
    try:
        build(working)
        try:
            working.rename(final)
        except OSError:
            if not final.is_dir():  # not the other process's work: a real failure
                raise
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return final


def _sweep(folder: Path) -> None:
    """Remove what builds that were killed left behind. One that is a day old is not running any more."""
    for entry in folder.glob(f"{_BUILDING}*"):
        try:
            if time.time() - entry.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(entry, ignore_errors=True)
        except FileNotFoundError:
            continue  # another process swept it
