"""Every mistake gives one line that names the key, what was found and what is right."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ullim.config.load import check_recipe
from ullim.errors import BadInput

sys.path.insert(0, str(Path(__file__).parent))
from recipes import RIGHT, checked, complaint, with_value

WRONG = [
    # Wrong types: nothing is converted in silence.
    ("loop.steps", "ten", "loop.steps: Input should be a valid integer (found 'ten')"),
    ("loop.steps", "10", "loop.steps: Input should be a valid integer (found '10')"),
    ("loop.steps", True, "loop.steps: Input should be a valid integer (found True)"),
    ("loop.steps", 2.0, "loop.steps: Input should be a valid integer (found 2.0)"),
    ("loop.steps", {"a": 1}, "loop.steps: Input should be a valid integer (found a section)"),
    ("loop.watchdog_s", float("nan"), "loop.watchdog_s: Input should be a finite number (found nan)"),
    ("prompts.shuffle", "yes", "prompts.shuffle: Input should be a valid boolean (found 'yes')"),
    ("policy.path", 5, "policy.path: Input should be a valid string (found 5)"),
    ("sampling.stop_strings", "x", "sampling.stop_strings: Input should be a valid tuple (found 'x')"),
    (
        "sampling.stop_strings",
        [""],
        "sampling.stop_strings.0: String should have at least 1 character (found '')",
    ),
    ("sampling.stop_strings", ["x", 3], "sampling.stop_strings.1: Input should be a valid string (found 3)"),
    ("learner.betas", [0.9], "learner.betas.1: missing; the list is too short"),
    ("loop", 3, "loop: must be a section, [loop] with keys below it (found 3)"),
    ("rewards.len", 3, "rewards.len: must be a section, [rewards.len] with keys below it (found 3)"),
    ("rewards", [1], "rewards: must be a section, [rewards] with keys below it (found [1])"),
    # Out of range.
    ("loop.max_staleness", -1, "loop.max_staleness: Input should be greater than or equal to 0 (found -1)"),
    ("loop.group_size", 1, "loop.group_size: Input should be greater than or equal to 2 (found 1)"),
    ("learner.betas", [0.9, 1.0], "learner.betas.1: Input should be less than 1 (found 1.0)"),
    ("objective.dual_clip", 1.0, "objective.dual_clip: Input should be greater than 1 (found 1.0)"),
    ("rewards.len.weight", -1, "rewards.len.weight: Input should be greater than or equal to 0 (found -1)"),
    # Enumerations list their choices.
    ("loop.mode", "fast", "loop.mode: Input should be 'async' or 'sync' (found 'fast')"),
    ("engine.kind", "vllm", "engine.kind: Input should be 'transformers' (found 'vllm')"),
    (
        "objective.ratio",
        "word",
        "objective.ratio: Input should be 'token', 'sequence' or 'sequence_token' (found 'word')",
    ),
    (
        "rewards.len.kind",
        "lenth",
        'rewards.len.kind: must be one of "length", "length_binary", "overlong", "function", "model" (found \'lenth\')',
    ),
    (
        "rewards.new",
        {"target": 3},
        'rewards.new.kind: missing; write one of "length", "length_binary", "overlong", "function", "model"',
    ),
    # Missing.
    ("rewards.new", {"kind": "length_binary"}, "rewards.new.limit: missing; this key is required"),
    ("rewards", {}, "[rewards] is empty; write at least one channel, such as [rewards.length]"),
    # Contradictions.
    (
        "loop",
        {"mode": "sync", "max_staleness": 2},
        'loop: mode = "sync" is on-policy; write max_staleness = 0 or mode = "async" (found 2)',
    ),
    (
        "rewards.len.weight",
        0,
        "every channel of [rewards] has weight 0; give at least one a positive weight",
    ),
    (
        "rewards.over",
        {"kind": "overlong", "limit": 10, "buffer": 11},
        "rewards.over: buffer (11) must not exceed limit (10)",
    ),
    (
        "objective.correction",
        {"mode": "mask", "floor": 2.0},
        "objective.correction: floor (2) must be below cap (2)",
    ),
    (
        "objective.correction.floor",
        0.5,
        'objective.correction: floor (0.5) needs mode = "mask" (found "truncate")',
    ),
    (
        "objective.correction.level",
        "geometric",
        'objective.correction: level = "geometric" needs mode = "mask" (found "truncate"): a bounded mean is a test, '
        "not a weight",
    ),
    (
        "objective.correction.anchor",
        "rollout",
        'objective.correction: anchor = "rollout" has the engine\'s log-prob in the ratio already; write mode = "none" '
        '(found "truncate")',
    ),
    (
        "objective.advantage.scale",
        "batch",
        'objective.advantage: scale = "batch" needs kind = "summed"; decoupled always normalises by group',
    ),
    (
        "objective.exploration",
        {"cov_low": 3.0, "cov_high": 2.0},
        "objective.exploration: cov_low (3) must not exceed cov_high (2)",
    ),
    # Forms.
    (
        "rewards.mine",
        {"kind": "function", "function": "mine.politeness"},
        "rewards.mine.function: 'mine.politeness' is not of the form package.module:function",
    ),
    (
        "run.name",
        "a b",
        "run.name: 'a b' must hold letters, digits, _ . and - only, and not start with . or -",
    ),
    (
        "run.dir",
        "runs/{date}",
        "run.dir: 'runs/{date}' has braces that are not {name}; write literal ones twice",
    ),
    (
        "rewards.2nd",
        {"kind": "length_binary", "limit": 3},
        "rewards.2nd: a channel's name holds letters, digits, _ and - only and starts with no digit",
    ),
]


@pytest.mark.parametrize(("path", "value", "line"), WRONG, ids=[f"{path}={value!r:.30}" for path, value, _ in WRONG])
def test_one_line_says_what_is_wrong(path: str, value: Any, line: str) -> None:
    assert complaint(with_value(path, value)) == line


@pytest.mark.parametrize(("key", "cut"), [("top_p", 0.9), ("top_k", 50), ("min_p", 0.1), ("repetition_penalty", 1.1)])
def test_what_cuts_the_distribution_is_refused_for_training(key: str, cut: float) -> None:
    line = complaint(with_value(f"sampling.{key}", cut))
    assert line.startswith(f"sampling.{key}: training rollouts must be drawn from the whole distribution")
    neutral = {"top_p": "1", "top_k": "0", "min_p": "0", "repetition_penalty": "1"}[key]
    assert f"write {key} = {neutral} " in line
    assert line.endswith(f"(found {cut})")


@pytest.mark.parametrize(("key", "whole"), [("top_p", 1), ("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0)])
def test_the_whole_distribution_may_be_said(key: str, whole: float) -> None:
    assert getattr(checked(f"sampling.{key}", whole).sampling, key) == whole


@pytest.mark.parametrize(("updates", "fits"), [(1, True), (2, True), (3, False), (8, True), (16, False)])
def test_the_batch_is_cut_into_equal_updates(updates: int, fits: bool) -> None:
    data = with_value("learner.updates_per_step", updates)
    if fits:
        check_recipe(data, "my.toml")
        return
    assert complaint(data).startswith(
        f"loop.groups_per_step (8) must be divisible by learner.updates_per_step ({updates})"
    )


def test_an_unknown_key_lists_those_of_its_section_and_the_nearest() -> None:
    line = complaint(with_value("loop.stpes", 3))
    assert line.startswith("loop.stpes: unknown key; did you mean steps? [loop] has: group_size, groups_per_step, ")
    line = complaint(with_value("objective.correction.zzz", 3))
    assert line == (
        "objective.correction.zzz: unknown key; [objective.correction] has: anchor, cap, floor, level, mode"
    )


def test_an_unknown_section_lists_the_sections() -> None:
    line = complaint(with_value("leaner.ranks", 1))
    assert line.startswith("leaner: unknown key; did you mean learner? a recipe has: checkpoint, engine, learner, loop")


def test_an_unknown_key_of_a_channel_is_named_as_written_with_the_keys_of_its_kind() -> None:
    assert complaint(with_value("rewards.len.foo", 3)) == (
        'rewards.len.foo: unknown key; [rewards.len] of kind "length" has: '
        "kind, target, unit, weight, width_long, width_short"
    )


def test_a_channel_may_be_called_like_its_kind() -> None:
    data = with_value("rewards.length", {"kind": "length", "target": 0, "width_short": 1, "width_long": 1})
    assert complaint(data) == "rewards.length.target: Input should be greater than 0 (found 0)"


@pytest.mark.parametrize("section", ["policy", "prompts", "rewards"])
def test_a_recipe_without_what_it_needs_names_it(section: str) -> None:
    data = {name: value for name, value in RIGHT.items() if name != section}
    assert complaint(data) == f"{section}: missing; this key is required"


def test_each_of_several_mistakes_has_its_line() -> None:
    data = with_value("loop.stesp", 3) | {"policy": {"path": ""}, "learner": {"ranks": 0}}
    with pytest.raises(BadInput) as caught:
        check_recipe(data, "my.toml")
    keys = [line.strip().split(":")[0] for line in str(caught.value).splitlines()[1:]]
    assert sorted(keys) == ["learner.ranks", "loop.stesp", "policy.path"]


def test_a_huge_value_is_shown_in_part() -> None:
    line = complaint(with_value("loop.mode", "x" * 10_000))
    assert len(line) < 150


def test_sync_mode_needs_no_word_about_staleness_and_is_on_policy() -> None:
    assert checked("loop.mode", "sync").loop.max_staleness == 0
    assert checked("loop", {"mode": "sync", "max_staleness": 0}).loop.max_staleness == 0
    assert checked("loop.max_staleness", 3).loop.max_staleness == 3


def test_a_channel_of_weight_zero_beside_a_weighted_one_is_right() -> None:
    recipe = checked("rewards.watched", {"kind": "length_binary", "limit": 3, "weight": 0})
    assert recipe.rewards["watched"].weight == 0


def test_config_imports_without_torch_or_ray() -> None:
    """Editors, dashboards and `--help` read recipes; seconds of imports would be felt."""
    code = (
        "import sys, ullim.config\n"
        "heavy = {'torch', 'ray', 'transformers', 'numpy', 'pyarrow'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
