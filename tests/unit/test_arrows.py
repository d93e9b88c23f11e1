"""The arrows between rooms point one way (docs/flow.md has the picture)."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "asyncrl"

LEAVES = {"types", "errors", "protocols"}
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "event_loop": set(),
    "internals": {"errors"},
    "protocols": {"types"},
    "config": {"errors"},
    "data": {"types", "errors", "protocols", "config"},
    "plugins": {"types", "errors", "protocols", "compat", "algorithms"},
    "compat": LEAVES | {"config", "algorithms"},
    "rewards": LEAVES,
    "filters": LEAVES,
    "algorithms": set(),
    "metrics": {"types", "errors"},
    "buffer": {"types", "errors"},
    "pipeline": LEAVES | {"event_loop", "buffer", "metrics"},
    "engines": LEAVES | {"event_loop", "config", "algorithms"},
    "sim": LEAVES | {"event_loop", "buffer", "metrics", "pipeline"},
}
"""``checks`` and ``assembly`` may import everything; nothing imports them but what starts a run, or its dry run."""

NEVER_OUTSIDE_ENGINES = {"torch", "ray", "aiohttp", "httptools", "sglang", "sglang_router", "megatron"}
MAY_USE: dict[str, set[str]] = {"algorithms": {"torch"}}
WITHIN_ENGINES = {
    "sglang": {"aiohttp", "httptools", "sglang", "torch"},
    "megatron": {"torch", "megatron"},
    "cluster": {"ray"},
}


def rooms() -> list[str]:
    return sorted({path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()})


@functools.cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py")) if (ROOT / room).is_dir() else [ROOT / f"{room}.py"]


@pytest.mark.parametrize("room", [room for room in rooms() if room in MAY_IMPORT])
def test_a_room_imports_only_what_it_may(room: str) -> None:
    for path in files(room):
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("asyncrl.")}
        assert ours <= MAY_IMPORT[room] | {room}, path


@pytest.mark.parametrize("room", [room for room in rooms() if room in MAY_IMPORT and room != "engines"])
def test_only_engines_touch_the_outside(room: str) -> None:
    for path in files(room):
        outside = {name.split(".")[0] for name in imports(path)} & NEVER_OUTSIDE_ENGINES
        assert outside <= MAY_USE.get(room, set()), path


@pytest.mark.parametrize("engine", sorted(WITHIN_ENGINES))
def test_each_engine_touches_its_own_outside(engine: str) -> None:
    for path in files(f"engines/{engine}"):
        outside = {name.split(".")[0] for name in imports(path)} & NEVER_OUTSIDE_ENGINES
        assert outside <= WITHIN_ENGINES[engine], path


def test_every_room_is_in_the_table() -> None:
    assert set(rooms()) - set(MAY_IMPORT) <= {
        "__init__",
        "assembly",
        "checks",
        "collector",
        "dry_run",
        "entry",
        "resume",
        "signals",
    }
