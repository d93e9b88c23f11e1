"""The pages name files, modules and commands that are there, and the packages and arrows that the code has."""

import re
from pathlib import Path

import pytest

from tests.unit.test_arrows import CONFIG, LEAVES, MAY_IMPORT, MODELS

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
BENCHMARKS = ROOT / "benchmarks" / "README.md"
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
"""Records of commands as they were run; their links must still lead somewhere."""

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?:[\w.-]+/)*(?:[\w-]+\.py|[\w.-]+/)")
DOTTED = re.compile(r"\basyncrl(?:\.[A-Za-z_]\w*)+")
MENTIONED = re.compile(r"(?<![\w/.])(?:docs|benchmarks)/[\w./-]+\.md")
BENCHMARK = re.compile(r"-m (benchmarks\.[a-z]\w*)")
EXAMPLES = {
    "file.py",
    "my_calculator.py",
    "my_rewards.py",
    "my_reward.py",
    "my_filters.py",
    "my_picks.py",
    "my_advantages.py",
    "my_losses.py",
    "my_corrections.py",
    "benchmarks/NAME.py",
}
"""Files of a user, and of docs/plugins.md."""
ELSEWHERE = {
    "runs/",
    "model/",
    "logs/",
    "tensorboard/",
    "wandb/",
    "fp8.py",
    "fp8_utils.py",
    "loader.py",
    "fused_moe_triton/layer.py",
}
"""Folders of a run, and files of SGLang."""


def is_there(name: str, page: Path) -> bool:
    """Return whether ``name`` is there, relative to the root, to the package, or to the page."""
    return any((base / name).exists() for base in (ROOT, ROOT / "asyncrl", page.parent))


def paths(text: str) -> list[str]:
    codes = CODE.findall(FENCE.sub("", text))
    return [code for code in codes if PATH.fullmatch(code) and code not in EXAMPLES | ELSEWHERE]


def missing(text: str, page: Path) -> list[str]:
    """Return the paths in ``text`` that lead nowhere.  A file's name alone may stand for a neighbour of a full path."""
    named = paths(text)
    folders = {name.rpartition("/")[0] for name in named if "/" in name}
    gone = [name for name in named if not is_there(name, page)]
    return [name for name in gone if "/" in name or not any(is_there(f"{each}/{name}", page) for each in folders)]


def module_or_name(dotted: str) -> bool:
    """Return whether a dotted name leads to a module, or to a name that the module's source mentions."""
    path, parts = ROOT, dotted.split(".")
    for number, part in enumerate(parts):
        if (path / part).is_dir():
            path = path / part
            continue
        source = (path / part).with_suffix(".py")
        rest = parts[number + 1 :] if source.exists() else parts[number:]
        source = source if source.exists() else path / "__init__.py"
        return len(rest) <= 2 and all(re.search(rf"\b{name}\b", source.read_text()) for name in rest)
    return True


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of ``page``."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    names = (re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)
    explicit = re.findall(r'<a (?:id|name)="([^"]+)"', page.read_text())
    return {*names, *explicit}


def shown(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.mark.parametrize("name", shown([*PAGES, BENCHMARKS, *RESULTS]))
def test_links_lead_somewhere(name: str) -> None:
    page, broken = ROOT / name, []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        target, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        there = page if not target else page.parent / target
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("name", shown([*PAGES, BENCHMARKS]))
def test_paths_are_there(name: str) -> None:
    page = ROOT / name
    text = page.read_text()
    assert missing(text, page) == []
    mentioned = MENTIONED.findall(re.sub(r"\]\([^)]*\)", "]", text))
    assert [path for path in mentioned if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", shown([*PAGES, BENCHMARKS]))
def test_dotted_names_are_modules_or_names_in_them(name: str) -> None:
    text = (ROOT / name).read_text()
    assert [dotted for dotted in DOTTED.findall(text) if not module_or_name(dotted)] == []


@pytest.mark.parametrize("name", shown([*PAGES, BENCHMARKS]))
def test_benchmarks_start_as_written(name: str) -> None:
    text = (ROOT / name).read_text()
    modules = [ROOT.joinpath(*module.split("."), "__main__.py") for module in BENCHMARK.findall(text)]
    assert [path for path in modules if not path.exists()] == []
    assert re.findall(r"python3? benchmarks/\w+\.py|\w\.__main__", text) == []


def may_import(cell: str, folder: str) -> set[str]:
    """Return the folders that a cell of docs/flow.md names, dotted as in ``MAY_IMPORT``."""
    found = {name.strip("/").replace("/", ".") for name in re.findall(r"`([\w/]+)`", cell)}
    if "leaves" in cell or "inputs" in cell:
        found |= LEAVES
    if "inputs" in cell:
        found |= MODELS | CONFIG
    if "config" in found:
        found |= CONFIG
    if "all folders of" in cell:
        found |= {name for name in MAY_IMPORT if name.startswith(f"{folder}.")} - {folder}
        found -= {folder}
    return found


def test_flow_has_every_arrow() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|[^|]*\| ([^|]*) \|$", (ROOT / "docs" / "flow.md").read_text(), re.MULTILINE)
    told: dict[str, set[str]] = {}
    for names, cell in rows:
        for name in re.findall(r"`([\w/]+)`", re.sub(r"\(.*?\)", "", names)):
            folder = name.strip("/").replace("/", ".")
            if folder in MAY_IMPORT:
                told[folder] = may_import(re.sub(r"\[.*?\]\(.*?\)", "", cell), folder)
    assert told == MAY_IMPORT


def test_a_path_that_is_gone_is_found() -> None:
    page = ROOT / "docs" / "flow.md"
    assert missing("`engines/roster.py`, `a b.py`, `rooms/`\n```\n`x/y.py`\n```", page) == [
        "engines/roster.py",
        "rooms/",
    ]
    assert missing("`pipeline/run.py`, `evaluation.py`, `tests/unit/`, `metrics.md`", page) == []
    assert missing("`pipeline/run.py`, `roster.py`", page) == ["roster.py"]


@pytest.mark.parametrize(
    ("dotted", "exists"),
    [
        ("asyncrl.filters.check_reward_nonzero_std", True),
        ("asyncrl.algorithms.custom_functions.StepSamples", True),
        ("asyncrl.engines.megatron", True),
        ("asyncrl.engines.roster", False),
        ("asyncrl.engines.megatron.weights.hf_weights.convert", False),
        ("asyncrl.algorithms.custom_functions.NoSuchName", False),
    ],
)
def test_dotted_names_are_looked_up_in_files(dotted: str, exists: bool) -> None:
    assert module_or_name(dotted) is exists


def test_anchors_are_those_of_github() -> None:
    assert "the-run-directory" in anchors(ROOT / "docs" / "running.md")
