"""From pydantic's findings to one line per mistake: the key, what was found, what is right."""

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ullim.config.schema import Place, kinds, locate, sections

_LONGEST_VALUE = 60


def lines(error: ValidationError) -> list[str]:
    """One line per mistake, in the user's own key names."""
    return [_line(item) for item in error.errors(include_url=False)]


def _line(item: ErrorDetails) -> str:
    place, found = locate(item["loc"]), item["input"]
    message = item["msg"].removeprefix("Value error, ")
    match item["type"]:
        case "extra_forbidden":
            return f"{place.name}: {_unknown(item)}"
        case "missing":
            short = place.keys and isinstance(place.keys[-1], int)
            return f"{place.name}: missing; {'the list is too short' if short else 'this key is required'}"
        case "union_tag_not_found":
            return f"{place.name}.kind: missing; write one of {_choices(place)}"
        case "union_tag_invalid":
            return f"{place.name}.kind: must be one of {_choices(place)} (found {_shown(found['kind'])})"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{place.name}: must be a section, [{place.name}] with keys below it (found {_shown(found)})"
        case "value_error" if isinstance(found, Mapping) or str(found) in message:
            pass  # the validator's own words say what was found
        case _:
            message = f"{message} (found {_shown(found)})"
    return f"{place.name}: {message}" if place.name else message


def _unknown(item: ErrorDetails) -> str:
    """What could have been meant where an unknown key stands."""
    *before, key = item["loc"]
    parent = locate(before)
    if parent.section is None:
        return "unknown key"
    known = sorted(parent.section.model_fields)
    kind = "".join(f' of kind "{kind}"' for kind in kinds(parent.section) if len(before) > len(parent.keys))
    where = f"[{parent.name}]{kind}" if parent.name else "a recipe"
    near = difflib.get_close_matches(str(key), known, n=1)
    return f"unknown key; {f'did you mean {near[0]}? ' if near else ''}{where} has: {', '.join(known)}"


def _choices(place: Place) -> str:
    return ", ".join(f'"{kind}"' for section in sections(place.annotation) for kind in kinds(section))


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a section"
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
