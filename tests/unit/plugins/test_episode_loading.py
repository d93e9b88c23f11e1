"""Functions and environments that generate samples: their paths, their shapes, and one line for each mistake."""

import sys
from pathlib import Path

import pytest

from asyncrl.errors import PluginError
from asyncrl.plugins.episodes import load_episode

CODE = """
import functools

async def mine(ep): pass
async def with_default(episode, depth=1): pass
async def slimes(args, sample, sampling_params): return sample
async def evaluates(args, sample, sampling_params, evaluation=False): return sample
async def batched(args, samples, evaluation=False): return samples
def plain(ep): pass
async def two(ep, other): pass
async def short(args, sample): pass
value = 3

def depth(number):
    async def episode(ep): pass
    return episode

class Callable:
    def __init__(self, limit): self.limit = limit
    async def __call__(self, ep): pass

class Guess:
    def __init__(self, high=9): self.high = high
    def reset(self, prompt): return "guess"
    def step(self, action): return "higher", 0.0, False, {}

class Half:
    def step(self, action): return "higher", 0.0, False, {}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "package_of_episodes").mkdir()
    (tmp_path / "package_of_episodes" / "inside.py").write_text(CODE)


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("mine.py:mine", "native"),
        ("mine.py:with_default", "native"),
        ("mine.py:depth(3)", "native"),
        ("mine.py:Callable(limit=2)", "native"),
        ("package_of_episodes.inside:mine", "native"),
        ("package_of_episodes.inside.slimes", "slime"),
        ("mine.py:slimes", "slime"),
        ("mine.py:evaluates", "slime"),
        ("mine.py:batched", "slime"),
        ("mine.py:Guess", "environment"),
        ("mine.py:Guess(high=3)", "environment"),
    ],
)
def test_paths_and_shapes(path: str, shape: str) -> None:
    assert load_episode(path).shape == shape


def test_arguments_of_an_environment_make_its_object() -> None:
    assert load_episode("mine.py:Guess(high=3)").function().high == 3


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("mine.py:plain", "must be written with 'async def', not 'def'"),
        ("mine.py:two", "must take (ep), takes (ep, other)"),
        ("mine.py:short", "must take slime's (args, sample, sampling_params), takes (args, sample)"),
        ("mine.py:value", "is 3, not a function"),
        ("mine.py:Half", "Half has step but no reset; an environment has both"),
        ("mine.py:Callable", "is a class without step"),
        ("mine.py:none", "mine.py has no function 'none'; it has:"),
        ("absent.py:mine", "no such file:"),
        ("mine.py:depth(3, 4)", "depth(3, 4): too many positional arguments; it takes (number)"),
        ("nowhere", "must be dotted.path.name, module:function or file.py:function"),
    ],
)
def test_a_mistake_gets_one_line(path: str, line: str) -> None:
    with pytest.raises(PluginError) as caught:
        load_episode(path)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("async def custom_generate(args, samples, evaluation=False): pass\nasync def generate_single(x): pass", None),
        ("async def anything(ep): pass", None),
        ("async def alone(ep): pass\nasync def helper(ep): pass", "alone"),
        ("class Guess:\n    def reset(self): pass\n    def step(self, action): pass\nasync def helper(a): pass", None),
    ],
    ids=["a usual name", "the only function", "the name of the file", "the only environment"],
)
def test_a_file_alone_names_its_function(tmp_path: Path, code: str, name: str | None) -> None:
    file = tmp_path / f"{name or 'file'}.py"
    file.write_text(code)
    assert load_episode(str(file)).function is not None


def test_a_file_alone_with_several_functions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "several.py").write_text("async def one(ep): pass\nasync def two(ep): pass")
    with pytest.raises(PluginError, match=r"it has several.py:one, several.py:two; write several.py:NAME"):
        load_episode("several.py")
