"""Rooms and floors: who may import whom. What this file says is what `docs/architecture.md` draws.

A room imports from its own floor or a lower one, never in a circle, and a few libraries have one home each.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "ullim"

FLOORS = {
    "records": 1,
    "errors": 1,
    "config": 1,
    "objective": 1,
    "text": 1,
    "signals": 2,
    "engines": 2,
    "weights": 2,
    "rewards": 2,
    "learner": 2,
    "assets": 3,
    "monitor": 3,
    "orchestration": 4,
    "cli": 6,
}

ALONE = {"objective", "text"}
"""Rooms that import nothing of ours: pure functions that anyone may lift out."""

HOMES = {"ray": {"orchestration"}, "vllm": {"engines/vllm.py", "weights/vllm_gloo.py"}}
"""Libraries and the only rooms or files that may import them."""


def imports(file: Path) -> Iterator[str]:
    """Full names of the modules that `file` imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import hides which room it reaches into"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(file: Path, package: Path) -> str:
    """The folder, or the file where it lies in none; the package's own `__init__` is `ullim`."""
    top = file.relative_to(package).parts[0].removesuffix(".py")
    return package.name if top == "__init__" else top


def edges(package: Path) -> dict[str, set[str]]:
    """Room -> other rooms of ours that it imports."""
    found: dict[str, set[str]] = {}
    for file in package.rglob("*.py"):
        room = room_of(file, package)
        reached = found.setdefault(room, set())
        for name in imports(file):
            first, *rest = name.split(".")
            if first == package.name and rest and rest[0] in FLOORS and rest[0] != room:
                reached.add(rest[0])
    return found


def breaches(package: Path) -> list[str]:
    """Everything that the rules forbid, one line each."""
    graph = edges(package)
    graph.pop(package.name, None)
    lines = [f"{room} has no floor" for room in graph if room not in FLOORS]
    for room, others in graph.items():
        lines += [f"{room} looks up to {other}" for other in others if FLOORS[other] > FLOORS.get(room, 0)]
        if room in ALONE:
            lines += [f"{room} must stand alone but imports {other}" for other in others]
    for file in package.rglob("*.py"):
        for name in imports(file):
            homes = HOMES.get(name.split(".")[0])
            if homes is not None and not homes & {room_of(file, package), file.relative_to(package).as_posix()}:
                lines.append(f"{file.relative_to(package)} imports {name}")
    if (circle := cycle(graph)) is not None:
        lines.append("circle: " + " -> ".join(circle))
    return sorted(lines)


def cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """Rooms of one circle of imports, None where there is none."""
    state: dict[str, str] = {}

    def visit(room: str, path: list[str]) -> list[str] | None:
        if state.get(room) == "done":
            return None
        if room in path:
            return [*path[path.index(room) :], room]
        for other in sorted(graph.get(room, ())):
            if (found := visit(other, [*path, room])) is not None:
                return found
        state[room] = "done"
        return None

    return next((found for room in sorted(graph) if (found := visit(room, [])) is not None), None)


def test_every_room_keeps_to_its_floor() -> None:
    assert breaches(PACKAGE) == []


def test_every_room_of_the_table_exists() -> None:
    assert {room_of(file, PACKAGE) for file in PACKAGE.rglob("*.py")} - {"ullim"} == set(FLOORS)


@pytest.mark.parametrize(
    ("file", "text", "breach"),
    [
        ("weights/a.py", "from ullim.orchestration import gate", "weights looks up to orchestration"),
        ("config/a.py", "def f():\n    import ullim.learner.step", "config looks up to learner"),
        ("objective/a.py", "from ullim.errors import BadInput", "objective must stand alone but imports errors"),
        ("text/a.py", "from ullim import records", "text must stand alone but imports records"),
        ("learner/a.py", "from ray import get", "learner/a.py imports ray.get"),
        ("engines/other.py", "import vllm.config", "engines/other.py imports vllm.config"),
        ("attic/a.py", "", "attic has no floor"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, file: str, text: str, breach: str) -> None:
    path = tmp_path / "ullim" / file
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    assert breaches(tmp_path / "ullim") == [breach]


def test_a_circle_on_one_floor_is_found(tmp_path: Path) -> None:
    for room, other in (("signals", "rewards"), ("rewards", "weights"), ("weights", "signals")):
        path = tmp_path / "ullim" / room / "a.py"
        path.parent.mkdir(parents=True)
        path.write_text(f"from ullim.{other}.a import x", encoding="utf-8")
    assert breaches(tmp_path / "ullim") == ["circle: rewards -> weights -> signals -> rewards"]


def test_what_is_allowed_is_not_a_breach(tmp_path: Path) -> None:
    path = tmp_path / "ullim" / "engines" / "vllm.py"
    path.parent.mkdir(parents=True)
    path.write_text("import vllm\nimport torch\nfrom ullim.weights.manifest import X\n", encoding="utf-8")
    assert breaches(tmp_path / "ullim") == []
