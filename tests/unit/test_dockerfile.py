"""The Dockerfile installs the pins of pyproject.toml, and nothing that .dockerignore keeps away from it."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
LINES = [line for line in re.sub(r"\\\n", " ", TEXT).splitlines() if line.strip() and not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = {
    name: version
    for line in (*PROJECT["project"]["dependencies"], *PROJECT["tool"]["uv"]["constraint-dependencies"])
    for name, _, version in [line.partition("==")]
}


def arguments() -> dict[str, str]:
    return {name: value.strip('"') for name, value in re.findall(r"^ARG (\w+)=(.*)$", TEXT, re.MULTILINE)}


def steps(instruction: str) -> list[str]:
    return [line.removeprefix(f"{instruction} ") for line in LINES if line.startswith(f"{instruction} ")]


def test_cuda_is_the_version_of_torchs_packages() -> None:
    image = re.fullmatch(r"nvidia/cuda:([\d.]+)-devel-ubuntu24\.04", arguments()["CUDA_IMAGE"])
    assert image is not None
    assert image[1] == PINS["cuda-toolkit"]
    major, minor, _ = image[1].split(".")
    assert PINS["nvidia-cuda-runtime"].startswith(f"{major}.{minor}.")


def test_python_is_the_projects() -> None:
    python = arguments()["PYTHON_VERSION"]
    major, minor = map(int, python.split("."))
    assert PROJECT["project"]["requires-python"] == f">={python},<{major}.{minor + 1}"


def test_only_uv_installs_packages_and_takes_their_versions_from_the_project() -> None:
    installs = [step for step in steps("RUN") if re.search(r"\bpip\b|\buv (?:sync|pip|add)\b", step)]
    (uv, *syncs) = installs
    assert 'pip install --no-cache-dir "uv==${UV_VERSION}"' in uv
    assert re.fullmatch(r"\d+\.\d+\.\d+", arguments()["UV_VERSION"])
    assert len(syncs) == 2
    assert all(step.startswith("uv sync ") and "--no-dev" in step for step in syncs)
    assert all(re.search(r"--upgrade|--no-config|--override|pip", step) is None for step in syncs)


def test_the_build_has_no_other_source_of_packages() -> None:
    assert re.findall(r"https?://\S+", TEXT) == []
    assert steps("ADD") == []


def ignored(path: str) -> bool:
    """Return whether .dockerignore keeps ``path`` away: the last pattern that matches decides."""
    result = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and (pattern == "*" or path == pattern or path.startswith(f"{pattern}/")):
            result = not line.startswith("!")
    return result


def test_the_build_gets_what_it_copies_and_no_more() -> None:
    copied = [word for step in steps("COPY") for word in step.split()[:-1]]
    assert [path for path in copied if not (ROOT / path).exists() or ignored(path)] == []
    assert {"asyncrl", "configs", "train.py", "train_async.py", "pyproject.toml"} <= set(copied)
    for path in (".git", ".venv", "uv.lock", "runs", "models", "data", "tests", "benchmarks/results"):
        assert ignored(path), path


def test_the_project_s_package_is_copied_before_it_is_installed() -> None:
    order = [line.split()[0] + " " + line.split()[1] for line in LINES if line.startswith(("COPY", "RUN uv"))]
    assert order.index("COPY pyproject.toml") < order.index("RUN uv") < order.index("COPY asyncrl")
    assert order[-1] == "RUN uv"


@pytest.mark.parametrize("variable", ["HOME", "USER", "LOGNAME"])
def test_any_user_may_run_the_image(variable: str) -> None:
    assert re.search(rf"\b{variable}=\S+", steps("ENV")[-1])
    assert any("mkdir --mode=1777 /home/asyncrl /workspace" in step for step in steps("RUN"))
    assert steps("USER") == []


def test_the_page_has_the_arguments_of_the_dockerfile() -> None:
    page = (ROOT / "docs" / "start" / "container.md").read_text()
    told = dict(re.findall(r"^\| `([A-Z_]+)` \| (?:`([^`]*)`|empty) \|", page, re.MULTILINE))
    assert told == arguments()
