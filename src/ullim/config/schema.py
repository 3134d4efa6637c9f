"""The recipe's shape, as the pydantic models have it: what stands at a key, and which keys a section has."""

import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from ullim.config.base import Section
from ullim.config.run import Recipe

Key = int | str


class Place(NamedTuple):
    """A place in a recipe: its keys as a person writes them, and what may stand there (None: nothing may)."""

    keys: tuple[Key, ...]
    annotation: Any

    @property
    def name(self) -> str:
        return ".".join(str(key) for key in self.keys)

    @property
    def section(self) -> type[Section] | None:
        """The one section that may stand here; None for a plain value and where `kind` chooses among several."""
        found = sections(self.annotation)
        return found[0] if len(found) == 1 else None


def locate(location: Sequence[Key]) -> Place:
    """The place that a pydantic error location means.

    Where `kind` chooses among sections pydantic puts the chosen kind into the location (`rewards.len.length.target`);
    it is no key, so it chooses the section here and stays out of the name (`rewards.len.target`).
    """
    keys: list[Key] = []
    annotation: Any = Recipe
    for part in location:
        choice = sections(annotation)
        if len(choice) > 1:
            annotation = next((section for section in choice if part in kinds(section)), None)
            continue
        keys.append(part)
        annotation = _below(annotation, part)
    return Place(tuple(keys), annotation)


def is_text(path: Sequence[str]) -> bool:
    """Whether only a string may stand at the dotted `path`, whatever kind its section is of."""
    level: list[Any] = [Recipe]
    for key in path:
        options = [option for annotation in level for option in (sections(annotation) or (annotation,))]
        level = [below for option in options if (below := _below(option, key)) is not None]
    return bool(level) and all(_only_strings(annotation) for annotation in level)


def sections(annotation: Any) -> tuple[type[Section], ...]:
    """The sections that may stand where `annotation` does, in order of their declaration."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    return tuple(section for option in _options(annotation) for section in sections(option))


def kinds(section: type[Section]) -> tuple[str, ...]:
    """What `kind` must be in this section; () where it has no such key."""
    field = section.model_fields.get("kind")
    return () if field is None else get_args(field.annotation)


def _options(annotation: Any) -> tuple[Any, ...]:
    """What a union chooses among, or what an Annotated describes."""
    if get_origin(annotation) is Annotated:
        return (get_args(annotation)[0],)
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ()


def _below(annotation: Any, key: Key) -> Any:
    """What may stand at `key` within `annotation`; None where it has no such key."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        field = annotation.model_fields.get(str(key))
        return None if field is None else field.annotation
    return get_args(annotation)[1] if get_origin(annotation) is dict else None


def _only_strings(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return all(isinstance(choice, str) for choice in get_args(annotation))
    options = [option for option in _options(annotation) if option is not types.NoneType]
    return annotation is str or (bool(options) and all(map(_only_strings, options)))
