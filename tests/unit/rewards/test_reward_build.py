import sys
from pathlib import Path

import pytest

from ullim.config.rewards import (
    BinaryLengthChannelConfig,
    FunctionChannelConfig,
    LengthChannelConfig,
    ModelChannelConfig,
    OverlongChannelConfig,
    RewardConfig,
)
from ullim.errors import BadInput
from ullim.rewards.build import build_channels
from ullim.rewards.imports import import_function

USERS_FILE = """
import math
LIMIT = 3
def polite(samples):
    return [1.0 for _ in samples]
"""


@pytest.fixture
def users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, holding a module of the user's, as it is when a console command starts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in [name for name in sys.modules if name.startswith("users_")]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "users_rewards.py").write_text(USERS_FILE, encoding="utf-8")
    (tmp_path / "users_broken.py").write_text("raise OSError('no key file')", encoding="utf-8")
    (tmp_path / "users_needs.py").write_text("import surely_not_installed", encoding="utf-8")
    return tmp_path


def test_every_kind_becomes_a_channel_of_its_name(users_folder: Path, reward_folder: Path) -> None:
    configs: dict[str, RewardConfig] = {
        "length": LengthChannelConfig(kind="length", target=10, width_short=3, width_long=5),
        "binary": BinaryLengthChannelConfig(kind="length_binary", limit=10),
        "overlong": OverlongChannelConfig(kind="overlong", limit=10, buffer=2),
        "mine": FunctionChannelConfig(kind="function", function="users_rewards:polite"),
        "judge": ModelChannelConfig(kind="model", path=str(reward_folder)),
    }
    channels = build_channels(configs, device="cpu", threads=1)
    assert {name: channel.name for name, channel in channels.items()} == {name: name for name in configs}


def test_a_function_in_the_current_folder_is_found(users_folder: Path) -> None:
    assert import_function("users_rewards:polite", key="k")([1, 2]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("users_absent:polite", "there is no module users_absent"),
        ("users_absent.inner:polite", "there is no module users_absent"),
        ("users_needs:polite", "there is no module surely_not_installed"),
        ("users_rewards:rude", "has no function 'rude'"),
        ("users_rewards:LIMIT", "is int, not a function"),
        ("users_broken:polite", "OSError: no key file"),
    ],
)
def test_a_function_that_cannot_be_had_names_its_key(users_folder: Path, path: str, message: str) -> None:
    config: dict[str, RewardConfig] = {"mine": FunctionChannelConfig(kind="function", function=path)}
    with pytest.raises(BadInput, match=f"rewards.mine.function: .*{message}"):
        build_channels(config, device="cpu", threads=1)


def test_a_builtin_must_be_resolved_before() -> None:
    config: dict[str, RewardConfig] = {"judge": ModelChannelConfig(kind="model", path="builtin:chitchat-kept-talking")}
    with pytest.raises(BadInput, match=r"rewards\.judge\.path: builtin:"):
        build_channels(config, device="cpu", threads=1)
