"""`ullim train` and `ullim demo`: from a recipe's path to a run and the table at its end."""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import ullim
from ullim.cli.progress import PreparationProgress
from ullim.config import Recipe, load_recipe
from ullim.errors import BadInput

DEMO = "smollm2-chitchat.toml"


def run_recipe(path: str | Path, arguments: Sequence[str], *, resume: bool) -> None:
    """Check the recipe, build what it names as `builtin:`, run it and show what came of it."""
    recipe = load_recipe(path, overrides(arguments))
    _run(recipe, Console(), resume=resume)


def run_demo(arguments: Sequence[str]) -> None:
    """The demo recipe under a run name that is free."""
    path = recipe_folder() / DEMO
    given = overrides(arguments)
    recipe = load_recipe(path, given)
    if not any(item.startswith(("run.name=", "run.dir=")) for item in given):
        recipe = load_recipe(path, [*given, f"run.name={_free_name(recipe)}"])
    _run(recipe, Console(), resume=False)


def overrides(arguments: Sequence[str]) -> list[str]:
    """`--a.b=c` and `--a.b c` alike, as `a.b=c`; BadInput for anything else."""
    found = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise BadInput(f"unexpected argument {argument!r}; settings are written as --section.key=value")
        if "=" not in argument:
            if not rest or rest[0].startswith("--"):
                raise BadInput(f"{argument}: a value is missing; write {argument}=VALUE")
            argument = f"{argument}={rest.pop(0)}"
        found.append(argument.removeprefix("--"))
    return found


def recipe_folder() -> Path:
    """Where the recipes of this installation lie: in the package, or in the checkout it runs from."""
    package = Path(ullim.__file__).parent
    for folder in (package / "recipes", package.parents[1] / "recipes"):
        if (folder / DEMO).is_file():
            return folder
    raise BadInput(f"the recipe {DEMO} is missing from this installation ({package}); install ullim again")


def _free_name(recipe: Recipe) -> str:
    """demo, demo-2, demo-3, ...: a second demo must not trip over the first."""
    for number in itertools.count(1):
        name = "demo" if number == 1 else f"demo-{number}"
        if not Path(recipe.run.dir.format(name=name)).exists():
            return name
    raise AssertionError("unreachable")


def _run(recipe: Recipe, console: Console, *, resume: bool) -> None:
    from ullim.assets import resolve_recipe  # torch and Ray load once the recipe is known to be right
    from ullim.cli.outcome import show_outcome
    from ullim.orchestration.run import train

    started = time.monotonic()
    with PreparationProgress(console) as progress:
        prepared = resolve_recipe(recipe, progress)
    result = train(prepared, resume=resume, console=console)
    show_outcome(result, console, seconds=time.monotonic() - started)
