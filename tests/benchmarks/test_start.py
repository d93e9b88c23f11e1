"""Each benchmark starts as a module, ``python -m benchmarks.NAME``, and so do its worker processes."""

import ast
import importlib
from pathlib import Path

import pytest

from benchmarks.common.circumstances import circumstances

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = sorted(file.parent.name for file in BENCHMARKS.glob("*/__main__.py"))


@pytest.mark.parametrize("name", NAMES)
def test_help_says_how_the_benchmark_is_started(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}.__main__").main(["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m benchmarks.{name} ")


@pytest.mark.parametrize("name", NAMES)
def test_worker_processes_run_no_function_of_a_main_module(name: str) -> None:
    # A spawned process does not import a package's ``__main__``, so it could not find the function.
    tree = ast.parse((BENCHMARKS / name / "__main__.py").read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    started = {
        word.value.id
        for word in ast.walk(tree)
        if isinstance(word, ast.keyword) and word.arg in ("target", "initializer") and isinstance(word.value, ast.Name)
    }
    assert started & functions == set()


def test_circumstances_record_the_command_as_it_was_given() -> None:
    about = circumstances("rounding", ["--model", "tiny"], commit="abc")
    assert about["command"] == "python -m benchmarks.rounding --model tiny"
    assert about["commit"] == "abc"
