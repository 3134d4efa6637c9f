"""The layout of a run directory, the one place where a run's results live.

    config.toml     the recipe as resolved
    metrics.jsonl   one strict JSON object a step
    samples/        step-000012.parquet
    checkpoints/
    tensorboard/
    replaced/       what a resumed run set aside, one numbered folder a resume

Dashboard and report need nothing else, so a finished run opens on another machine just as well.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ullim.errors import BadInput
from ullim.monitor.files import write_atomically
from ullim.monitor.toml_writer import to_toml


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run. Use `create` for a new run and `open` for one that exists."""

    path: Path

    @classmethod
    def create(cls, path: Path | str, resolved_config: Mapping[str, Any]) -> Self:
        """Make the directory and write `resolved_config` into it.

        A directory that already holds a run is refused with BadInput, and so is a place where no directory can
        be made. Files of other kinds that lie there are left alone.
        """
        run = cls(Path(path))
        text = to_toml(resolved_config)
        if run.holds_run():
            raise run._holds_run_already()
        try:
            for folder in (run.samples, run.checkpoints, run.tensorboard):
                folder.mkdir(parents=True, exist_ok=True)
            _write_new(run.config, text)
        except FileExistsError as error:
            if error.filename == str(run.config):  # two runs started into one directory at the same moment
                raise run._holds_run_already() from None
            raise BadInput(f"{error.filename} is a file; write run.dir = a new or empty directory") from None
        except OSError as error:
            raise BadInput(
                f"{run.path}: the run directory cannot be made ({error.strerror or error}); "
                f"write run.dir = a directory that you may write to, with free space"
            ) from error
        return run

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """A run that exists; BadInput where `path` holds none."""
        run = cls(Path(path))
        if not run.config.is_file():
            what = "holds no run (no config.toml)" if run.path.is_dir() else "no such run directory"
            raise BadInput(f"{run.path}: {what}; give the directory that `ullim train` printed")
        return run

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def replaced(self) -> Path:
        return self.path / "replaced"

    def _holds_run_already(self) -> BadInput:
        return BadInput(
            f"{self.path} already holds a run. Go on with it: --resume. Start another beside it: "
            f"--run.name=NAME or --run.dir=DIRECTORY"
        )

    def holds_run(self) -> bool:
        """Whether a run has begun here."""
        return self.config.exists() or self.metrics.exists()

    def read_config(self) -> dict[str, Any]:
        """The resolved recipe as nested dicts; BadInput where config.toml is not valid TOML."""
        try:
            return tomllib.loads(self.config.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise BadInput(f"{self.config}: cannot be read ({error})") from error

    def replace_config(self, resolved_config: Mapping[str, Any]) -> None:
        """Write the recipe of a resumed run; the former one, where it differs, is kept as config-1.toml and so on."""
        text = to_toml(resolved_config)
        former = self.config.read_text(encoding="utf-8")
        if former == text:
            return
        number = 1
        while (kept := self.path / f"config-{number}.toml").exists():
            number += 1
        write_atomically(kept, lambda temporary: _write_text(temporary, former))
        write_atomically(self.config, lambda temporary: _write_text(temporary, text))


def _write_new(path: Path, text: str) -> None:
    """Write a file that must not exist yet; a disk that fills up midway leaves none behind."""
    with path.open("x", encoding="utf-8", newline="\n") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink(missing_ok=True)
            raise


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
