"""From a reference in a recipe to a path."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from ullim.assets import chitchat, kept_talking, smollm2
from ullim.assets.cache import build_once
from ullim.config.rewards import ModelChannelConfig
from ullim.config.run import Recipe
from ullim.errors import BadInput

PREFIX = "builtin:"
Progress = Callable[[str, float], None]
"""Called with what is being done and the share done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Builtin:
    """Something made on first use."""

    what: str
    folder: str  # its name in the cache; changes whenever the content would
    build: Callable[[Path, Progress], None]
    file: str | None = None  # the file within the folder, where a file is meant


_PROMPTS = f"chitchat-prompts-{chitchat.REVISION}"

BUILTINS: Mapping[str, Builtin] = {
    "builtin:smollm2-135m": Builtin(
        "SmolLM2-135M-Instruct, a policy", f"smollm2-135m-{smollm2.REVISION}", smollm2.build_smollm2
    ),
    "builtin:chitchat": Builtin(
        "prompts from human conversations", _PROMPTS, chitchat.build_prompts, chitchat.TRAIN_FILE
    ),
    "builtin:chitchat-heldout": Builtin(
        "prompts from other conversations, never trained on", _PROMPTS, chitchat.build_prompts, chitchat.HELDOUT_FILE
    ),
    "builtin:chitchat-kept-talking": Builtin(
        "a reward model: did the partner keep talking",
        f"chitchat-kept-talking-{kept_talking.REVISION}",
        kept_talking.build_reward_model,
    ),
}


def resolve(reference: str, progress: Progress = lambda text, share: None) -> Path:
    """The path that `reference` means: a `builtin:NAME`, made and cached if need be, or a path as it stands.

    `progress` is called while something is being made (up to about 90 s on one core for the reward model), never
    where it is cached. Raises BadInput for an unknown name, and for a package that is not installed, naming it.
    """
    if not reference.startswith(PREFIX):
        return Path(reference).expanduser()
    builtin = BUILTINS.get(reference)
    if builtin is None:
        known = ", ".join(f"{name} ({entry.what})" for name, entry in BUILTINS.items())
        raise BadInput(f"there is no {reference}; known are {known}")

    def build(folder: Path) -> None:
        with _quiet_transformers():
            builtin.build(folder, progress)

    folder = build_once(builtin.folder, build)
    return folder / builtin.file if builtin.file else folder


def resolve_recipe(recipe: Recipe, progress: Progress = lambda text, share: None) -> Recipe:
    """`recipe` with every `builtin:` reference replaced by its path. With `builtin:chitchat` and no held-out path,
    the held-out prompts become those of the other conversations."""
    heldout = recipe.prompts.heldout_path
    if heldout is None and recipe.prompts.path == "builtin:chitchat":
        heldout = "builtin:chitchat-heldout"
    rewards = {
        name: channel.model_copy(update={"path": str(resolve(channel.path, progress))})
        if isinstance(channel, ModelChannelConfig)
        else channel
        for name, channel in recipe.rewards.items()
    }
    prompts: dict[str, Any] = {"path": str(resolve(recipe.prompts.path, progress))}
    if heldout is not None:
        prompts["heldout_path"] = str(resolve(heldout, progress))
    return recipe.model_copy(
        update={
            "policy": recipe.policy.model_copy(update={"path": str(resolve(recipe.policy.path, progress))}),
            "prompts": recipe.prompts.model_copy(update=prompts),
            "rewards": rewards,
        }
    )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without transformers' own bars and its report of an untrained head, which is the point of fitting one."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
