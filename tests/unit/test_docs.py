"""The documentation names only what is there: tests, files, settings."""

import ast
import re
from pathlib import Path

import pytest

from ullim.config.schema import locate

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted([*(REPOSITORY / "docs").rglob("*.md"), *REPOSITORY.glob("*.md")])
SECTIONS = "policy|prompts|rewards|run|sampling|engine|nodes|objective|learner|loop|weights|monitor|checkpoint"


def page_id(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


@pytest.fixture(scope="module")
def functions() -> set[str]:
    """Names of all functions under tests/, the conformance checks among them."""
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in (REPOSITORY / "tests").rglob("*.py"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_test_that_a_page_names_exists(page: Path, functions: set[str]) -> None:
    named = set(re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")))
    assert named <= functions


def test_the_conformance_checks_named_by_the_architecture_exist(functions: set[str]) -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    for check in ("answers_live_through_an_update", "a_failed_transfer_changes_nothing"):
        assert f"`{check}`" in text
        assert check in functions


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_file_that_a_page_links_to_exists(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_setting_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(rf"`-{{0,2}}((?:{SECTIONS})(?:\.[a-z_]+)+)", page.read_text(encoding="utf-8"))
    unknown = {key for key in named if locate(key.split(".")).annotation is None and not _elsewhere(key)}
    assert unknown == set()


def _elsewhere(key: str) -> bool:
    """Names that look like a setting: a module or file of ours, or an attribute in text about code."""
    room, *rest = key.split(".")
    folder = REPOSITORY / "src" / "ullim" / room
    return rest[-1] in ("py", "json", "toml", "jsonl") or (folder / f"{rest[0]}.py").is_file()
