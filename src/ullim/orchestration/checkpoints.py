"""Checkpoints of a run: complete or absent, the last k kept.

`checkpoints/step-000050/` holds what the learners wrote and `run.json` with the controller's state. It is
written under another name and renamed at the end, so a crash midway leaves the former one as the newest.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ullim.errors import BadInput
from ullim.orchestration.peers import Learners

_NAME = re.compile(r"step-(\d{6,})")
_STATE = "run.json"


class Checkpoints:
    """The checkpoints in `folder`, of which the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def all(self) -> list[tuple[int, Path]]:
        """(step, path) of every complete checkpoint, oldest first."""
        if not self._folder.is_dir():
            return []
        found = ((_NAME.fullmatch(path.name), path) for path in self._folder.iterdir())
        return sorted((int(match[1]), path) for match, path in found if match and (path / _STATE).is_file())

    def newest(self) -> Path:
        """The checkpoint to resume from; BadInput where there is none."""
        found = self.all()
        if not found:
            raise BadInput(f"{self._folder}: no complete checkpoint")
        return found[-1][1]

    async def write(self, step: int, state: Mapping[str, Any], learners: Learners) -> Path:
        """Have the learners write theirs, add `state`, make it visible in one rename, remove what is too old."""
        final = self._folder / f"step-{step:06d}"
        unfinished = self._folder / f"unfinished-{step:06d}"
        for leftover in self._folder.glob("unfinished-*"):
            shutil.rmtree(leftover)
        unfinished.mkdir(parents=True)
        await learners.save(unfinished.resolve())
        (unfinished / _STATE).write_text(json.dumps(state, allow_nan=False, indent=1), encoding="utf-8")
        if final.exists():  # a resumed run comes by the same step again
            shutil.rmtree(final)
        os.replace(unfinished, final)
        for _, path in self.all()[: -self._keep]:
            shutil.rmtree(path)
        return final

    @staticmethod
    def state(path: Path) -> dict[str, Any]:
        """The controller's state in a checkpoint; BadInput where the file is not what `write` wrote."""
        try:
            state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadInput(
                f"{path / _STATE}: cannot be read ({error}); remove {path} to resume from the one before"
            ) from error
        if not isinstance(state, dict) or not {"version", "gate", "stream", "counters"} <= state.keys():
            raise BadInput(f"{path / _STATE}: not a run state; remove {path} to resume from the one before")
        return state
