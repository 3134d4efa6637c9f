"""From `package.module:function` in a recipe to the function."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ullim.errors import BadInput


def import_function(path: str, *, key: str) -> Callable[..., Any]:
    """The callable that `path` names; `key` is the recipe's key, for the error.

    The current folder is searched last: a console command, unlike `python script.py`, does not have it on the path,
    and it is where people keep a reward function of their own. Raises BadInput where the module cannot be imported,
    fails while importing, or has no such callable. Importing runs the module's code.
    """
    module_name, _, name = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = f"there is no module {error.name}" if error.name else str(error)
        raise BadInput(
            f"{key}: cannot import {path!r}: {missing}; it must be installed or lie under the current folder ({here})"
        ) from error
    except Exception as error:  # whatever the user's module raises is the user's to mend, and is named
        raise BadInput(f"{key}: importing {module_name!r} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if function is None:
        raise BadInput(f"{key}: module {module_name!r} ({module.__file__}) has no function {name!r}")
    if not callable(function):
        raise BadInput(f"{key}: {path!r} is {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]
