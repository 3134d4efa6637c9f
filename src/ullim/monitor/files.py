"""Writing files so that a reader, or a run that resumes after a crash, never sees half of one."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ullim.errors import BadInput, RunFailed


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in place in one move.

    Raises RunFailed naming `path` when the disk is full, the folder read-only or gone; what stood at `path`
    before is then unchanged and no temporary file is left.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        sync_file(temporary)
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Return once the file's bytes are on the disk; without it a power cut can leave the new name with no content."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Return once the names in `path` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> RunFailed:
    """The one message for a disk that refuses a write while a run goes on."""
    return RunFailed(
        f"{path}: cannot be written ({error.strerror or error}). What was written before is whole: make room or "
        f"restore access, then go on with --resume"
    )


def refuse_second_writer(file: IO[Any], path: Path) -> None:
    """Hold `file` for this process until it is closed; BadInput where another process holds it.

    Two runs that write one directory would mix their rows, and resuming a run that still lives is an easy slip.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput(f"{path}: another process is writing this run; wait for it or stop it, then --resume") from None
    except OSError:
        pass  # a file system without locks: the run goes on unguarded
