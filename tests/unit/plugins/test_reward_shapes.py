"""The shapes of a user's reward: functions of both kinds, groups, classes and files alone."""

import sys
from pathlib import Path

import pytest

from asyncrl.compat import SlimeArgs
from asyncrl.errors import PluginError
from asyncrl.plugins.rewards import load_reward, method_of_class

ARGS = SlimeArgs(lr=0.5)

CODE = """
async def waits(prompt, sample): return 1.0
def computes(prompt, sample): return 1.0
async def slimes(args, sample, **kwargs): return 1.0
def slimes_plain(args, sample): return 1.0
async def group(prompt, samples): return [1.0 for _ in samples]
def group_plain(prompt, samples): return [1.0 for _ in samples]
async def slimes_group(args, samples, **kwargs): return [1.0 for _ in samples]
def other_names(question, answers): return 1.0
def nothing(): return 1.0

class Model:
    def __init__(self, model_path, scale=1.0):
        self.scale = scale
    def compute_reward(self, prompts, responses):
        return [self.scale] * len(responses)

class WithArgs:
    def __init__(self, args):
        self.lr = args.lr
    def compute_reward(self, prompts, responses):
        return [self.lr] * len(responses)

class Plain:
    def compute_reward(self, prompts, responses):
        return [2.0] * len(responses)

class Loads:
    def __init__(self):
        raise AssertionError("constructed in the driver")
    def compute_reward(self, prompts, responses):
        return []

class Waits:
    async def compute_reward(self, prompts, responses): return []
class Short:
    def compute_reward(self, prompts): return []
model = Plain()
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(CODE)


@pytest.mark.parametrize(
    ("name", "is_group", "runs"),
    [
        ("waits", False, "in the process of user code"),
        ("computes", False, "in a worker"),
        ("slimes", False, "in the process of user code"),
        ("slimes_plain", False, "in a worker"),
        ("group", True, "in the process of user code"),
        ("group_plain", True, "in a worker"),
        ("slimes_group", True, "in the process of user code"),
        ("other_names", True, "in a worker"),
        ("other_names", False, "in a worker"),
        ("Model('path')", False, "as a class"),
        ("WithArgs", False, "as a class"),
        ("Plain", False, "as a class"),
        ("Loads", False, "as a class"),
    ],
)
def test_where_a_reward_runs(name: str, is_group: bool, runs: str) -> None:
    assert load_reward(f"mine.py:{name}", ARGS, is_group=is_group).runs == runs


def test_a_reward_of_the_list_that_a_generate_function_returns_needs_no_groups() -> None:
    args = SlimeArgs(lr=0.5, custom_generate_function_path="mine.py:generate")
    assert load_reward("mine.py:slimes_group", args, is_group=False).runs == "in the process of user code"
    for name in ("group", "group_plain"):  # only functions of slime's shape get such a list
        with pytest.raises(PluginError, match="give --group-rm as well"):
            load_reward(f"mine.py:{name}", args, is_group=False)
    with pytest.raises(PluginError, match=r"takes \(\)"):
        load_reward("mine.py:nothing", args, is_group=False)
    with pytest.raises(PluginError, match="give --group-rm as well"):
        load_reward("mine.py:slimes_group", SlimeArgs(custom_generate_function_path=None), is_group=False)


@pytest.mark.parametrize(
    ("name", "rewards"), [("Model('path', scale=3.0)", [3.0]), ("WithArgs", [0.5]), ("Plain", [2.0])]
)
def test_a_class_is_constructed_where_it_is_called(tmp_path: Path, name: str, rewards: list[float]) -> None:
    assert method_of_class(f"mine.py:{name}", ARGS, tmp_path)(["question"], ["answer"]) == rewards


def test_a_class_gets_the_settings_of_its_parameters_names(tmp_path: Path) -> None:
    args = SlimeArgs(lr=0.5, model_path="path", scale=7.0)
    assert method_of_class("mine.py:Model", args, tmp_path)(["question"], ["answer"]) == [1.0]


@pytest.mark.parametrize(
    ("name", "is_group", "line"),
    [
        ("group", False, "takes (prompt, samples), all samples of a group at once; give --group-rm as well"),
        ("slimes_group", False, "takes (args, samples, kwargs), all samples of a group at once; give --group-rm"),
        ("waits", True, "takes (prompt, sample), one sample; with --group-rm it must take (prompt, samples)"),
        ("slimes", True, "takes (args, sample, kwargs), one sample; with --group-rm it must take (prompt, samples)"),
        ("Plain", True, "is a class, which is called with batches of answers anyway; leave out --group-rm"),
        ("Model", False, "Model takes (model_path, scale=1.0): missing a required argument: 'model_path'; write "),
        ("Model(1, 2, 3)", False, "Model takes (model_path, scale=1.0): too many positional arguments; write file.py:"),
        ("Waits", False, "Waits.compute_reward must be written with 'def', not 'async def'"),
        ("Short", False, "Short.compute_reward must take (prompts, responses), takes (prompts)"),
        ("model", False, "is an object; name its class: file.py:Plain(...)"),
    ],
)
def test_a_wrong_shape_is_one_line(name: str, is_group: bool, line: str) -> None:
    with pytest.raises(PluginError) as error:
        load_reward(f"mine.py:{name}", ARGS, is_group=is_group)
    assert str(error.value).startswith(f"--custom-rm-path 'mine.py:{name}': {line}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("code", "runs"),
    [
        ("class CustomRewardModel:\n    def compute_reward(self, prompts, responses): return []", "as a class"),
        (
            "async def reward_func(args, sample, **kwargs): return 1.0\nasync def helper(x): pass",
            "in the process of user code",
        ),
        ("def rm(args, sample): return 1.0", "in a worker"),
        ("class Other: pass\nfrom asyncrl.compat import Sample\ndef reward(prompt, sample): return 1.0", "in a worker"),
    ],
)
def test_a_file_alone(tmp_path: Path, code: str, runs: str) -> None:
    file = tmp_path / f"custom_{abs(hash(code))}.py"
    file.write_text(code)
    for path in (file.name, str(file)):
        assert load_reward(path, ARGS, is_group=False).runs == runs


@pytest.mark.parametrize(
    ("code", "has"),
    [
        ("def reward(p, s): pass\ndef rm(a, s): pass", "it has two.py:reward, two.py:rm; write two.py:NAME"),
        ("def score(p, s): pass\ndef _hidden(): pass", "it has two.py:score; write two.py:NAME"),
        ("", "it has none; write two.py:NAME"),
    ],
)
def test_a_file_with_several_or_none_lists_them(tmp_path: Path, code: str, has: str) -> None:
    folder = tmp_path / str(abs(hash(code)))
    folder.mkdir()
    (folder / "two.py").write_text(code)
    with pytest.raises(PluginError) as error:
        load_reward(f"{folder}/two.py", ARGS, is_group=False)
    assert str(error.value).endswith(has)
    assert "needs exactly one class with compute_reward, or one function named reward, rm, " in str(error.value)


def test_a_file_alone_that_is_missing_is_named() -> None:
    with pytest.raises(PluginError, match=r"no such file: .*/gone\.py"):
        load_reward("gone.py", ARGS, is_group=False)
