import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.compat import SlimeArgs
from asyncrl.errors import PluginError
from asyncrl.filters import RewardBounds
from asyncrl.plugins import KEEP, load_plugin
from tests.unit.scored_groups import group

ARGS = SlimeArgs(lr=0.5)
CODE = """
made = []

def at_most(*texts, **settings):
    made.append((texts, settings))
    def keep(group):
        return repr((texts, settings))
    return keep

def slimes(limit):
    def keep(args, samples, **kwargs):
        return args.lr < limit
    return keep

class Keep:
    def __init__(self, word="none"):
        self.word = word
    def __call__(self, group):
        return self.word

async def coroutine(limit): ...
def gives_a_number(limit): return limit
def gives_an_async_function(limit):
    async def keep(group): ...
    return keep
def raises(limit): raise LookupError(f"no {limit}")
number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my filters (2)").mkdir()
    for name in ("f.py", "my filters (2)/f.py", "made_for_a_test.py"):
        (tmp_path / name).write_text(CODE)
    return tmp_path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("path", "verdict"),
    [
        ("f.py:at_most()", "((), {})"),
        ("f.py:at_most( 3, -0.5, high = 1e9 )", "((3, -0.5), {'high': 1000000000.0})"),
        ("f.py:at_most('a:b(c)', x=(1, [2, {'k': None}]), y={True})", None),
        ("my filters (2)/f.py:at_most(1)", "((1,), {})"),
        ("made_for_a_test:at_most(1)", "((1,), {})"),
        ("made_for_a_test.at_most(low=1)", "((), {'low': 1})"),
        ("f.py:Keep()", "none"),
        ("f.py:Keep(word='some')", "some"),
        ("f.py:slimes(0.4)", "keep"),
    ],
)
def test_literal_arguments(path: str, verdict: str | None) -> None:
    given = load_plugin(path, KEEP, ARGS)(group(0, (1.0,)))
    assert given == (verdict or repr((("a:b(c)",), {"x": (1, [2, {"k": None}]), "y": {True}})))


@pytest.mark.usefixtures("here")
def test_a_factory_is_called_once_when_the_run_starts() -> None:
    keep = load_plugin("f.py:at_most(1)", KEEP, ARGS)
    module = sys.modules[keep.__module__]
    before = len(module.made)
    keep(group(0, (1.0,)))
    assert (before, len(module.made)) == (1, 1)


def test_shipped_filters_take_arguments() -> None:
    assert load_plugin("asyncrl.filters:RewardBounds(low=0.1, high=0.9)", KEEP, ARGS) == RewardBounds(low=0.1, high=0.9)
    assert load_plugin("asyncrl.filters.RewardBounds(low=0.1)", KEEP, ARGS) == RewardBounds(low=0.1)


HOW = "write arguments as in name(0.5) or name(low=0.1, high=0.9)"
LITERAL = "is not a literal: a number, a text, True, False, None, or a tuple, list, set or dict of those"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("f.py:Keep(1", HOW),
        ("f.py:Keep)", HOW),
        ("made_for_a_test.Keep(1", HOW),
        ("f.py:Keep(,)", f"cannot read the arguments '(,)'; {HOW}"),
        ("f.py:Keep(a b)", f"cannot read the arguments '(a b)'; {HOW}"),
        ("f.py:Keep(1)(2)", f"cannot read the arguments '(1)(2)'; {HOW}"),
        ("f.py:Keep(word=1, word=2)", f"cannot read the arguments '(word=1, word=2)'; {HOW}"),
        ("f.py:Keep(1) + print(2)", f"cannot read the arguments '(1) + print(2)'; {HOW}"),
        ("f.py:Keep(open('x'))", f"argument open('x') {LITERAL}"),
        ("f.py:Keep(word=lr)", f"argument lr {LITERAL}"),
        ("f.py:Keep(*[1])", f"argument *[1] {LITERAL}"),
        ("f.py:Keep(**{'word': 1})", f"argument **{{'word': 1}} cannot be read; {HOW}"),
        ("f.py:Keep(1, 2)", "Keep(1, 2): too many positional arguments; it takes (word='none')"),
        ("f.py:slimes()", "slimes(): missing a required argument: 'limit'; it takes (limit)"),
        ("f.py:Keep(wrod=1)", "Keep(wrod=1): got an unexpected keyword argument 'wrod'; it takes (word='none')"),
        ("f.py:raises(3)", "raises(3) raised LookupError: no 3"),
        ("asyncrl.filters:RewardBounds(low=1, high=0)", "RewardBounds(low=1, high=0) raised ValueError: low 1 must "
         "not be above high 0"),
        ("f.py:number(1)", "'number' is 3, which takes no arguments"),
        ("f.py:coroutine(1)", "'coroutine' is written with 'async def', so it cannot make a plug-in; name it without "
         "arguments"),
        ("f.py:gives_a_number(1)", "is 1, not a function"),
        ("f.py:gives_an_async_function(1)", "must be written with 'def', not 'async def'"),
        ("f.py:nothing(1)", "f.py has no function 'nothing'; it has: at_most, coroutine, gives_a_number, "
         "gives_an_async_function, raises, slimes"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_line(path: str, line: str) -> None:
    with pytest.raises(PluginError) as error:
        load_plugin(path, KEEP, ARGS)
    assert str(error.value) == f"--dynamic-sampling-filter-path '{path}': {line}"


@pytest.mark.usefixtures("here")
def test_the_cause_of_a_factory_that_raises_is_kept() -> None:
    with pytest.raises(PluginError) as error:
        load_plugin("f.py:raises(3)", KEEP, ARGS)
    cause: Any = error.value.__cause__
    assert isinstance(cause, LookupError)
