"""From a TOML file and dotted overrides to a checked Recipe, or to one clear error."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ullim.config.mistakes import lines
from ullim.config.run import Recipe
from ullim.config.schema import is_text
from ullim.errors import BadInput


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read `path`, apply overrides such as `loop.max_staleness=2` in order, and check the whole.

    An override's value is read as TOML (`3`, `0.5`, `true`, `"text"`, `[1, 2]`); what is not TOML, or stands where
    only a string can, is taken as it is written. Raises BadInput with one line per mistake, each naming the key, what
    was found and what is right.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such recipe; see recipes/ for examples") from None
    except IsADirectoryError:
        raise BadInput(f"{path}: a directory, not a recipe; give a .toml file") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); a recipe is UTF-8 text") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and nesting without end
        raise BadInput(f"{path}: not valid TOML: {error}") from error
    given = [override.removeprefix("--") for override in overrides]
    for override in given:
        _apply(data, override)
    return check_recipe(data, source=" ".join([str(path), *(f"--{override}" for override in given)]))


def check_recipe(data: dict[str, Any], source: str) -> Recipe:
    """A Recipe from nested dicts; BadInput names `source` and every mistake."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise BadInput("\n".join([f"{source}:", *(f"  {line}" for line in lines(error))])) from None


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise BadInput(f"override {override!r}: write it as --section.key=value, e.g. --loop.max_staleness=2")
    table = data
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise BadInput(f"override {override!r}: {part} is a value, not a section")
    table[parts[-1]] = _value(parts, text)


def _value(parts: Sequence[str], text: str) -> Any:
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    if len(read) > 1 or (is_text(parts) and not isinstance(read["value"], str)):
        return text  # several lines, or a number where only a name can stand: --run.name=7
    return read["value"]
