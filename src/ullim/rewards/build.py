"""From the `[rewards.NAME]` sections of a recipe to live channels."""

from collections.abc import Mapping
from pathlib import Path
from typing import assert_never

import torch

from ullim.config.rewards import (
    BinaryLengthChannelConfig,
    FunctionChannelConfig,
    LengthChannelConfig,
    ModelChannelConfig,
    OverlongChannelConfig,
    RewardConfig,
)
from ullim.errors import BadInput
from ullim.rewards.channel import RewardChannel
from ullim.rewards.function import FunctionChannel
from ullim.rewards.imports import import_function
from ullim.rewards.length import binary_channel, continuous_channel, overlong_channel
from ullim.rewards.model import ModelChannel, RewardScorer


def build_channels(
    rewards: Mapping[str, RewardConfig], *, device: str | torch.device = "cpu", threads: int | None = None
) -> dict[str, RewardChannel]:
    """One channel per section, by name. Loads models and imports functions; BadInput names the key at fault.

    `device` is where reward models run, `threads` the torch threads of each. References such as `builtin:...` must
    have been resolved to folders before (`ullim.assets.resolve`), as nodes have no business building assets.
    """
    return {name: _build(name, config, device, threads) for name, config in rewards.items()}


def _build(name: str, config: RewardConfig, device: str | torch.device, threads: int | None) -> RewardChannel:
    match config:
        case LengthChannelConfig():
            return continuous_channel(
                name,
                target=config.target,
                width_short=config.width_short,
                width_long=config.width_long,
                unit=config.unit,
            )
        case BinaryLengthChannelConfig():
            return binary_channel(name, limit=config.limit, unit=config.unit)
        case OverlongChannelConfig():
            return overlong_channel(name, limit=config.limit, buffer=config.buffer)
        case FunctionChannelConfig():
            function = import_function(config.function, key=f"rewards.{name}.function")
            return FunctionChannel(name, function, timeout_s=config.timeout_s, retries=config.retries)
        case ModelChannelConfig():
            if config.path.startswith("builtin:"):
                raise BadInput(f"rewards.{name}.path: {config.path} was not resolved to a folder before building")
            scorer = RewardScorer(
                Path(config.path).expanduser(),
                key=f"rewards.{name}.path",
                max_tokens=config.max_tokens,
                batch_size=config.batch_size,
                device=device,
            )
            return ModelChannel(name, scorer, threads=threads)
        case _:
            assert_never(config)
