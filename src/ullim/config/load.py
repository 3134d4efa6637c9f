"""From a TOML file and dotted overrides to a checked Recipe, or to one clear error."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ullim.config.run import Recipe
from ullim.errors import BadInput


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read `path`, apply overrides such as `loop.max_staleness=2` in order, and check the whole.

    An override's value is read as TOML (`3`, `0.5`, `true`, `"text"`, `[1, 2]`); what is not TOML is taken as
    a string. Raises BadInput with one line per mistake, each naming the key, what was found and what is right.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such recipe; see recipes/ for examples") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read ({error})") from error
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path}: not valid TOML: {error}") from error
    for override in overrides:
        _apply(data, override)
    return check_recipe(data, source=str(path))


def check_recipe(data: dict[str, Any], source: str) -> Recipe:
    """A Recipe from nested dicts; BadInput names `source` and every mistake."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise BadInput("\n".join([f"{source}:", *(f"  {line}" for line in _lines(error))])) from None


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.removeprefix("--").partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise BadInput(f"override {override!r}: write it as --section.key=value, e.g. --loop.max_staleness=2")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    table = data
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise BadInput(f"override {override!r}: {part} is a value, not a section")
    table[parts[-1]] = value


def _lines(error: ValidationError) -> list[str]:
    """One line per mistake, in the user's own key names."""
    lines = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        match item["type"]:
            case "extra_forbidden":
                message = f"unknown key; {_known_keys(item['loc'])}"
            case "missing":
                message = "missing; this key is required"
            case _ if not isinstance(item["input"], dict) and item["type"] != "value_error":
                message = f"{message} (found {item['input']!r})"
        lines.append(f"{where}: {message}" if where else message)
    return lines


def _known_keys(location: tuple[int | str, ...]) -> str:
    """What could have been meant where an unknown key stands."""
    model: Any = Recipe
    for part in location[:-1]:
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return "see docs/recipes.md for the keys of this section"
        model = field.annotation
    names = ", ".join(sorted(getattr(model, "model_fields", {})))
    return f"this section has: {names}" if names else "see docs/recipes.md for the keys of this section"
