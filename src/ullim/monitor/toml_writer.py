"""Nested dicts as TOML text, the inverse of `tomllib.loads`: the standard library reads TOML but does not write it."""

import re
from collections.abc import Mapping

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
_ESCAPED = re.compile(r'[\x00-\x1f\x7f"\\]')


def to_toml(data: Mapping[str, object]) -> str:
    """`data` as TOML 1.0: dicts, lists and tuples of str, bool, int and float.

    A key whose value is None is left out, since TOML has no null and our configs read an absent key as their
    default. `tomllib.loads(to_toml(data)) == data` for all else (tuples come back as lists). Raises TypeError
    naming the key for any other type, and for None within a list, where leaving it out would shift the rest.
    """
    lines: list[str] = []
    _write_table(lines, data, ())
    return "\n".join(lines).strip("\n") + "\n"


def _write_table(lines: list[str], table: Mapping[str, object], path: tuple[str, ...]) -> None:
    """A table's own values must come before its sub-tables, or TOML reads them as the sub-table's."""
    values = {key: value for key, value in table.items() if value is not None and not isinstance(value, Mapping)}
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    if path and (values or not tables):
        lines += ["", f"[{'.'.join(_key(part) for part in path)}]"]
    lines += [f"{_key(key)} = {_value(value, (*path, key))}" for key, value in values.items()]
    for key, value in tables.items():
        _write_table(lines, value, (*path, key))


def _key(key: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a TOML key must be a string, got {key!r}")
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    return '"' + _ESCAPED.sub(lambda match: _ESCAPES.get(match[0], f"\\u{ord(match[0]):04x}"), text) + '"'


def _value(value: object, path: tuple[str, ...]) -> str:
    match value:
        case bool():  # before int, of which bool is a subclass
            return "true" if value else "false"
        case int():
            return int.__repr__(value)
        case float():  # the base class's repr: that of numpy's float64, a subclass, is not a TOML number
            return float.__repr__(value)
        case str():
            return _string(value)
        case list() | tuple():
            return "[" + ", ".join(_value(item, path) for item in value) + "]"
        case Mapping():
            pairs = (f"{_key(key)} = {_value(item, (*path, key))}" for key, item in value.items() if item is not None)
            return "{" + ", ".join(pairs) + "}"
    raise TypeError(f"{'.'.join(path)}: TOML cannot hold {value!r}")
