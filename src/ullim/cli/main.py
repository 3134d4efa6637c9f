"""The `ullim` command: its subcommands, and how each way of ending becomes an exit status.

0 done · 1 a run that started failed · 2 bad input (as for usage errors) · 130 interrupted
"""

import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ullim import __version__
from ullim.errors import BadInput, RunFailed

# Models come from folders and packages. Asking a hub by accident would leak what is being trained on.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

INTERRUPTED = 130
"""What typer makes of a KeyboardInterrupt: 128 and the signal's number, as shells have it."""

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    help="Improve a chat model from what its users do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        print(f"ullim {__version__}")
        raise typer.Exit


@app.command(context_settings=OVERRIDES)
def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A recipe, e.g. recipes/smollm2-chitchat.toml.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's newest checkpoint.")] = False,
) -> None:
    """Train a policy by asynchronous GRPO. Any key of the recipe can be overridden: `--loop.max_staleness=2`."""
    from ullim.cli.training import run_recipe

    run_recipe(recipe, context.args, resume=resume)


@app.command(context_settings=OVERRIDES)
def demo(context: typer.Context) -> None:
    """The whole job on a real model and real conversations; about ten minutes on two cores."""
    from ullim.cli.training import run_demo

    run_demo(context.args)


@app.command()
def doctor() -> None:
    """What is installed, which engine and transport will be used, and why."""
    from ullim.cli.doctor import report

    report(Console())


def main() -> None:
    """Entry point of the `ullim` command."""
    # A user's reward functions live where they work: `package.module:function` is looked up from here too.
    sys.path.insert(0, os.getcwd())
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    try:
        app()
    except BadInput as error:
        errors.print("[bold red]error:[/]", escape(str(error)))
        sys.exit(2)
    except RunFailed as error:
        errors.print("[bold red]run failed:[/]", escape(str(error)))
        sys.exit(1)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            errors.print("interrupted; go on from the newest checkpoint with --resume")
        raise
