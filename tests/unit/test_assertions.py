"""Every test asserts something, because a test that only runs also passes when the promise in its name is broken."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests").rglob("test_*.py"))
EXPECTS = {"pytest.raises", "pytest.warns", "pytest.fail"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def module(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def functions(path: Path) -> dict[str, Function]:
    """The functions at the top of a file, by name."""
    return {node.name: node for node in module(path).body if isinstance(node, Function)}


@cache
def imported(path: Path) -> dict[str, tuple[Path, str]]:
    """The names that a file imports from other files of the tests, with the file and the name there."""
    found: dict[str, tuple[Path, str]] = {}
    for node in ast.walk(module(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tests":
            source = ROOT.joinpath(*node.module.split(".")).with_suffix(".py")
            if source.exists():
                found |= {name.asname or name.name: (source, name.name) for name in node.names}
    return found


def asserts_itself(node: ast.AST) -> bool:
    """Whether the body has an assertion: a statement, an expected error, or a call of a function ``assert_...``."""
    return any(
        isinstance(part, ast.Assert)
        or (isinstance(part, ast.Call) and ast.unparse(part.func) in EXPECTS)
        or (isinstance(part, ast.Call) and ast.unparse(part.func).split(".")[-1].startswith("assert_"))
        for part in ast.walk(node)
    )


def helpers(path: Path, test: Function) -> Iterator[Function]:
    """The functions of the tests that a test calls by name."""
    for node in ast.walk(test):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            source, name = imported(path).get(node.func.id, (path, node.func.id))
            if name in functions(source):
                yield functions(source)[name]


def _tests(path: Path) -> Iterator[Function]:
    for node in ast.walk(module(path)):
        if isinstance(node, Function) and node.name.startswith("test"):
            yield node


def without_assertion(path: Path) -> list[str]:
    return [
        test.name
        for test in _tests(path)
        if not asserts_itself(test) and not any(asserts_itself(helper) for helper in helpers(path, test))
    ]


def test_assertions_are_found_in_a_test_and_in_the_helpers_that_it_calls(tmp_path: Path) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(
        """
def holds(number): assert number
def double(number): return 2 * number
def test_by_statement(): assert double(1)
def test_by_error():
    with pytest.raises(ValueError): double(1)
def test_by_library(): np.testing.assert_allclose(1, 1)
def test_by_helper(): holds(double(1))
def test_by_nothing(): double(1)
def test_by_a_method(): double.holds(1)
"""
    )
    assert without_assertion(path) == ["test_by_nothing", "test_by_a_method"]


def test_every_test_has_an_assertion() -> None:
    found = {str(path.relative_to(ROOT)): names for path in FILES if (names := without_assertion(path))}
    assert found == {}
