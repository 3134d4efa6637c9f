"""A small right recipe, and what is said of it once a key is changed."""

from copy import deepcopy
from typing import Any

from ullim.config.load import check_recipe
from ullim.config.run import Recipe
from ullim.errors import BadInput

RIGHT: dict[str, Any] = {
    "policy": {"path": "model"},
    "prompts": {"path": "prompts.jsonl"},
    "rewards": {"len": {"kind": "length", "target": 16, "width_short": 8, "width_long": 12}},
}


def with_value(path: str, value: Any) -> dict[str, Any]:
    """RIGHT with `value` at the dotted `path`; sections on the way are made."""
    data = deepcopy(RIGHT)
    *sections, key = path.split(".")
    table = data
    for section in sections:
        table = table.setdefault(section, {})
    table[key] = value
    return data


def checked(path: str, value: Any) -> Recipe:
    return check_recipe(with_value(path, value), "my.toml")


def complaint(data: dict[str, Any]) -> str:
    """The one line that is said of `data`; fails where it is right, or where more than one line comes out."""
    try:
        check_recipe(data, "my.toml")
    except BadInput as error:
        source, *lines = str(error).splitlines()
        assert source == "my.toml:"
        assert len(lines) == 1, lines
        return lines[0].strip()
    raise AssertionError("nothing was said of it")
