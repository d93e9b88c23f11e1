"""The arrows between packages point one way (docs/flow.md has the picture)."""

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "asyncrl"

LEAVES = {"types", "token_columns", "errors", "episodes", "internals", "protocols"} | {
    "blocking_calls",
    "daemon_threads",
    "event_loop",
    "folder_sync",
    "mischief",
    "outages",
    "plain_text",
    "process_identity",
    "quick_imports",
    "task_groups",
    "unhurried",
}
MODELS = {"models", "models.families"}
CONFIG = {"config", "config.areas", "config.slime"}
MEGATRON_INPUTS = LEAVES | MODELS | CONFIG | {"engines.megatron.setup"}
EMULATION = "engines.megatron.setup.cpu_emulation"
MAY_IMPORT: dict[str, set[str]] = {
    "api": CONFIG | {"errors", "daemon_threads", "app", "app.ending", "plain_text", "rollout_log"},
    "app.debugging": LEAVES | {"metrics", "rollout_log"},
    "app.ending": LEAVES | {"engines.cluster"},
    "app.resuming": CONFIG
    | LEAVES
    | {
        "data.streaming",
        "engines.megatron.checkpoint",
        "hooks",
        "models",
        "pipeline",
        "pipeline.scheduling",
    },
    "token_columns": set(),
    "types": {"token_columns"},
    "errors": set(),
    "episodes": {"types", "token_columns"},
    "blocking_calls": set(),
    "daemon_threads": {"mischief"},
    "event_loop": set(),
    "mischief": set(),
    "internals": {"errors"},
    "outages": {"errors", "event_loop", "protocols"},
    "folder_sync": set(),
    "plain_text": set(),
    "process_identity": set(),
    "protocols": {"types"},
    "quick_imports": set(),
    "task_groups": {"errors", "internals"},
    "unhurried": set(),
    "alarms": set(),
    "algorithms": set(),
    "buffer": {"types", "token_columns", "errors"},
    "buffer.journal": {"types", "token_columns", "errors", "daemon_threads", "folder_sync", "unhurried", "buffer"},
    "capacity": CONFIG | {"errors", "models"},
    "commands": CONFIG | {"app", "app.ending", "doctor", "engines.megatron.weights", "journal", "page"},
    "config": {"errors", "config.areas", "config.slime"},
    "compat": LEAVES | CONFIG | {"algorithms", "hooks"},
    "compat.episodes": LEAVES | {"compat", "rewards", "rollouts"},
    "compat.slime_shim": set(),
    "compat.slime_shim.slime": set(),
    "compat.slime_shim.slime.backends": set(),
    "compat.slime_shim.slime.backends.megatron_utils": set(),
    "compat.slime_shim.slime.observability": set(),
    "compat.slime_shim.slime.ray": set(),
    "compat.slime_shim.slime.rollout": {"errors", "compat"},
    "compat.slime_shim.slime.rollout.filter_hub": {"compat"},
    "compat.slime_shim.slime.rollout.rm_hub": {"errors", "rewards.graders"},
    "compat.slime_shim.slime.utils": {"compat", "compat.episodes", "data"},
    "config.areas": {"errors"},
    "config.slime": {"config.areas"},
    "data": LEAVES | CONFIG,
    "doctor": CONFIG | {"errors", "compat", "compat.episodes", "plugins", "engines.sglang"},
    "data.streaming": LEAVES | CONFIG | {"data"},
    "engines": LEAVES,
    "engines.cluster": LEAVES
    | {"engines", "engines.megatron", "engines.megatron.checkpoint", "engines.megatron.setup"}
    | {"engines.sglang", "engines.sglang.client", "engines.weight_sync", "models"}
    | {"engines.cluster.reaping"}
    | CONFIG,
    "engines.cluster.reaping": {"errors"},
    "engines.megatron": MEGATRON_INPUTS
    | {"capacity", "engines", "engines.weight_sync", "engines.megatron.checkpoint", "engines.megatron.model", EMULATION}
    | {"engines.megatron.fast_step", "engines.megatron.train", "engines.megatron.weights"},
    "engines.megatron.fast_step": MEGATRON_INPUTS | {"engines.megatron.model"},
    "engines.megatron.checkpoint": MEGATRON_INPUTS | {"engines"},
    "engines.megatron.model": MEGATRON_INPUTS,
    "engines.megatron.setup": LEAVES | MODELS | CONFIG | {"algorithms"},
    EMULATION: {"internals"},
    "engines.megatron.train": MEGATRON_INPUTS | {"algorithms", "engines.megatron.model", "engines.megatron.weights"},
    "engines.megatron.weights": MEGATRON_INPUTS
    | {"engines.weight_sync", "engines.megatron.checkpoint", "engines.megatron.model", EMULATION},
    "engines.sglang": LEAVES | {"engines"},
    "engines.sglang.client": LEAVES | {"engines", "engines.sglang", "engines.weight_sync"},
    "engines.sglang.plugin": LEAVES | {"engines", "engines.sglang", "engines.weight_sync"},
    "engines.sglang.plugin.cpu": {"internals"},
    "engines.weight_sync": LEAVES | {"engines"},
    "held_out": {"types"},
    "journal": {"errors", "types", "buffer", "buffer.journal", "rollout_log"},
    "filters": LEAVES | {"buffer"},
    "hooks": LEAVES,
    "metrics": {"types", "token_columns", "errors", "plain_text", "rollout_log"},
    "metrics.trackers": {"errors", "metrics"},
    "models": CONFIG | {"errors", "models.families"},
    "models.families": set(),
    "pipeline": LEAVES | {"buffer.journal", "held_out", "metrics", "pipeline.sampling", "pipeline.scheduling"},
    "pipeline.sampling": LEAVES | {"metrics"},
    "pipeline.scheduling": LEAVES | {"buffer", "buffer.journal", "metrics", "pipeline.sampling"},
    "rollout_log": LEAVES,
    "rollouts": LEAVES | {"rewards"},
    "rollouts.gateway": LEAVES | {"data", "rollouts"},
    "rollouts.environments": LEAVES | {"rollouts", "rollouts.tools"},
    "rollouts.tools": LEAVES | {"rollouts"},
    "rollouts.user_process": LEAVES | {"rollouts"},
    "rewards": LEAVES | {"config.areas", "rewards.graders"},
    "rewards.graders": LEAVES,
    "page": LEAVES | {"page.runs", "page.tabs"},
    "page.runs": LEAVES,
    "page.tabs": LEAVES
    | {"alarms", "data", "metrics", "rollout_log", "page.advising", "page.runs", "page.sample_index", "page.spans"},
    "page.advising": LEAVES | {"metrics", "rollout_log", "page.spans", "sim.calibration", "sim.model", "sim.search"},
    "page.sample_index": LEAVES | {"data", "rollout_log"},
    "page.spans": LEAVES | {"metrics"},
    "plugins": LEAVES | {"compat", "algorithms", "hooks"},
    "sim": {"internals"},
    "sim.calibration": LEAVES | {"metrics", "sim.model"},
    "sim.faults": LEAVES
    | {"buffer", "buffer.journal", "engines.cluster", "engines.megatron.checkpoint", "engines.sglang.client"}
    | {
        "engines.weight_sync",
        "metrics",
        "pipeline",
        "pipeline.sampling",
        "pipeline.scheduling",
        "sim",
        "sim.faults.world",
    },
    "sim.faults.world": LEAVES
    | {"engines", "engines.cluster", "engines.megatron.checkpoint", "engines.sglang", "engines.sglang.client"}
    | {"engines.weight_sync", "models", "pipeline.sampling", "pipeline.scheduling"},
    "sim.model": LEAVES | {"metrics", "pipeline", "pipeline.sampling", "pipeline.scheduling", "sim"},
    "sim.search": LEAVES | {"metrics", "sim.calibration", "sim.model"},
}
"""The folders that each folder may import.

A name stands for one folder's own modules, or for one top-level module.  Only ``app`` may import everything.
"""

OUTSIDE = {"torch", "ray", "aiohttp", "sglang", "sglang_router", "megatron"}
MAY_USE: dict[str, set[str]] = {
    "algorithms": {"torch"},
    "engines.cluster": {"ray"},
    "engines.megatron": {"torch", "megatron"},
    "engines.sglang": {"aiohttp", "sglang", "sglang_router", "torch"},
    "engines.weight_sync": {"torch"},
    "quick_imports": {"torch"},
    "page": {"aiohttp"},
    "rewards": {"aiohttp"},
    "rollouts.gateway": {"aiohttp"},
    "rollouts.tools": {"aiohttp", "sglang"},
}
"""Libraries of OUTSIDE that a folder, and every folder below it, may import."""

MOST_MODULES = 16


@functools.cache
def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def modules_of(folder: str) -> list[Path]:
    return [module for module in modules() if folder_of(module) == folder]


@functools.cache
def folder_of(module: Path) -> str:
    """``engines.sglang`` for a module of that folder; a top-level module is a folder of one."""
    parts = module.relative_to(PACKAGE).parts
    return ".".join(parts[:-1]) or module.stem


def folders() -> list[str]:
    return sorted({folder_of(module) for module in modules()} - {"__init__"})


@functools.cache
def imports(module: Path) -> frozenset[str]:
    """Dotted names of imported modules and packages, and of the names imported from them."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


@functools.cache
def imported_folders(module: Path) -> set[str]:
    found = set()
    for name in imports(module):
        path = ROOT.joinpath(*name.split("."))
        if name.startswith("asyncrl.") and path.with_suffix(".py").exists():
            found.add(folder_of(path.with_suffix(".py")))
        elif name.startswith("asyncrl.") and is_used_itself(path):
            found.add(folder_of(path / "__init__.py"))
    return found - {folder_of(module)}


def is_used_itself(package: Path) -> bool:
    """Whether an import from a package uses its ``__init__``, which then exports something."""
    init = package / "__init__.py"
    return init.exists() and any(not isinstance(node, ast.Expr) for node in ast.parse(init.read_text()).body)


def arrows() -> Iterator[tuple[str, str]]:
    for module in modules():
        for folder in imported_folders(module):
            yield folder_of(module), folder


def ring(graph: Mapping[str, set[str]]) -> list[str]:
    """A cycle of folders; empty if there is none."""
    left = {folder: set(others) for folder, others in graph.items()}
    while free := [folder for folder, others in left.items() if not others & left.keys()]:
        for folder in free:
            del left[folder]
    return sorted(left)


@pytest.mark.parametrize("folder", [folder for folder in folders() if folder != "app"])
def test_folder_imports_only_what_it_may(folder: str) -> None:
    for module in modules_of(folder):
        assert imported_folders(module) <= MAY_IMPORT[folder], module


def test_every_entry_of_the_table_is_a_folder() -> None:
    assert set(folders()) == set(MAY_IMPORT) | {"app"}


@pytest.mark.parametrize("folder", folders())
def test_folder_uses_only_its_own_libraries(folder: str) -> None:
    parents = [".".join(folder.split(".")[:depth]) for depth in range(1, folder.count(".") + 2)]
    may_use = set().union(*(MAY_USE.get(parent, set()) for parent in parents))
    for module in modules_of(folder):
        outside = {name.split(".")[0] for name in imports(module)} & OUTSIDE
        assert outside <= may_use, module


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_folders_form_no_ring_at_any_depth(depth: int) -> None:
    graph: dict[str, set[str]] = {}
    for start, end in arrows():
        tail, head = (".".join(name.split(".")[:depth]) for name in (start, end))
        graph.setdefault(head, set())
        graph.setdefault(tail, set()).update({head} - {tail})
    assert ring(graph) == []


def test_ring_is_found() -> None:
    assert ring({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["a", "b", "c", "d"]
    assert ring({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("folder", folders())
def test_folder_has_few_modules(folder: str) -> None:
    names = [module.stem for module in modules() if folder_of(module) == folder and module.stem != "__init__"]
    assert len(names) <= MOST_MODULES


def test_no_module_of_the_benchmarks_begins_with_an_underscore() -> None:
    names = {path.stem for path in (ROOT / "benchmarks").rglob("*.py")} - {"__init__", "__main__"}
    assert [name for name in sorted(names) if name.startswith("_")] == []
