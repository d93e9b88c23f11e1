import asyncio
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

from asyncrl.compat import SlimeArgs
from asyncrl.errors import PluginError
from asyncrl.filters import check_reward_nonzero_std
from asyncrl.plugins import KEEP, load_plugin
from asyncrl.plugins.rewards import load_reward
from asyncrl.types import FinishReason, GroupId, Prompt, Sample, ScoredGroup, ScoredSample, Span, Weights

ARGS = SlimeArgs(lr=0.5)
PROMPT = Prompt(row=7, epoch=0, text="one", token_ids=(1, 2), label="8", metadata={"a": 1})
SAMPLE = Sample(
    index=2,
    token_ids=(3, 4, 5),
    logprobs=array("f", [-1.0, -2.0, -3.0]),
    spans=(
        Span(weights=Weights(version=4, step=4), start=0, stop=1),
        Span(weights=Weights(version=5, step=5), start=1, stop=3),
    ),
    text="three",
    finish=FinishReason.LENGTH,
    seconds=1.0,
)
GROUP = ScoredGroup(
    group_id=GroupId(0),
    prompt=PROMPT,
    dispatched=Weights(version=4, step=4),
    samples=(ScoredSample(sample=SAMPLE, reward=0.5, loss_mask=(1, 0, 1)),),
)

CODE = """
import numpy
from asyncrl.compat import DynamicFilterOutput, Sample

async def ours(prompt, sample):
    return float(prompt.label) + len(sample.text)

class Scaled:
    def __init__(self, factor):
        self.factor = factor
    async def __call__(self, prompt, sample):
        return self.factor
    async def method(self, prompt, sample):
        return self.factor

scaled = Scaled(3.0)
method = scaled.method

async def slimes(args, sample: Sample, **kwargs):
    assert sample.status == Sample.Status.TRUNCATED and sample.status.value == "truncated"
    assert (sample.prompt, sample.response, sample.label, sample.tokens) == ("one", "three", "8", [1, 2, 3, 4, 5])
    assert (sample.response_length, sample.reward, sample.loss_mask) == (3, None, [1, 1, 1])
    assert (sample.group_index, sample.index, sample.metadata) == (7, 2, {"a": 1})
    assert (sample.weight_versions, sample.rollout_log_probs) == (["4", "5"], [-1.0, -2.0, -3.0])
    return numpy.float32(args.lr)

async def gives_a_dict(args, sample): return {"score": 1}
async def gives_true(args, sample): return True
async def one(x): return 0.0
async def three(prompt, sample, more): return 0.0
def plain(prompt, sample): return 0.0

def keep(group): return None if len(group.samples) > 1 else "too few"
async def keep_async(group): return None
def two(group, more): return None
def keep_true(args, samples, **kwargs): return samples[0].reward == 0.5 and samples[0].loss_mask == [1, 0, 1]
def keep_numpy(args, samples): return numpy.bool_(False)
def keep_reason(args, samples): return DynamicFilterOutput(keep=False, reason="dull")
def keep_silent(args, samples): return DynamicFilterOutput(keep=False)
def keep_nothing(args, samples): return None
def keep_tensor(args, samples): return numpy.array(samples[0].reward > 1)
def keep_with_fallback(args, samples):
    output = DynamicFilterOutput(numpy.array(False), "rare")
    output.keep_when_insufficient = True
    return output
number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/types.py").write_text(CODE)
    return tmp_path


def reward(path: str) -> Any:
    async def call() -> Any:
        return await load_reward(path, ARGS, is_group=False).function(PROMPT, SAMPLE)

    return asyncio.run(call())


@pytest.mark.parametrize(
    ("name", "expected"),
    [("ours", 13.0), ("scaled", 3.0), ("method", 3.0), ("slimes", 0.5), ("gives_true", 1.0)],
)
def test_rewards_of_both_shapes(here: Path, name: str, expected: float) -> None:
    assert reward(f"folder/types.py:{name}") == expected


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("keep", "too few"),
        ("keep_true", None),
        ("keep_numpy", "keep_numpy"),
        ("keep_reason", "dull"),
        ("keep_silent", "keep_silent"),
        ("keep_tensor", "keep_tensor"),
        ("keep_with_fallback", "rare"),
    ],
)
def test_filters_of_both_shapes(here: Path, name: str, verdict: str | None) -> None:
    assert load_plugin(f"{here}/folder/types.py:{name}", KEEP, ARGS)(GROUP) == verdict


def test_a_slime_filter_must_give_a_verdict(here: Path) -> None:
    with pytest.raises(TypeError, match="keep_nothing must return a bool or an object with keep and reason, got None"):
        load_plugin("folder/types.py:keep_nothing", KEEP, ARGS)(GROUP)


@pytest.mark.parametrize(
    "path",
    [
        "asyncrl.filters.check_reward_nonzero_std",
        "asyncrl.filters:check_reward_nonzero_std",
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback",
    ],
)
def test_dotted_paths_and_slime_s_own_filter(path: str) -> None:
    assert load_plugin(path, KEEP, ARGS) is check_reward_nonzero_std


def test_modules_are_found_in_the_working_directory(here: Path) -> None:
    (here / "rewards_of_a_test.py").write_text(CODE)
    assert reward("rewards_of_a_test:ours") == reward("rewards_of_a_test.ours") == 13.0


def test_a_file_loads_once_and_hides_no_module(here: Path) -> None:
    import types

    first, second = (load_reward("folder/types.py:ours", ARGS, is_group=False) for _ in range(2))
    assert first.function is second.function
    assert sys.modules["types"] is types


NAMES = "gives_a_dict, gives_true, keep, keep_async, keep_nothing, keep_numpy, keep_reason, keep_silent, keep_tensor, "


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (
            "my.rewards:exact",
            "no module named 'my' in {here} or on PYTHONPATH; "
            "export PYTHONPATH=FOLDER, the folder that has my, or write file.py:function",
        ),
        ("asyncrl.nowhere:exact", "no module named 'asyncrl.nowhere'"),
        ("asyncrl.protocols.nothing", "asyncrl.protocols has no function 'nothing'"),
        ("asyncrl.rewards.graders.f1:f", "asyncrl.rewards.graders.f1 has no function 'f'; it has: word_f1"),
        ("nowhere.py:f", "no such file: {here}/nowhere.py"),
        ("folder/types.py:", "names no function; write file.py:function"),
        ("exact", "must be dotted.path.name, module:function or file.py:function"),
        (":exact", "must be dotted.path.name, module:function or file.py:function"),
        ("folder/types.py:one", "must take (prompt, sample) or slime's (args, sample, **kwargs), takes (x)"),
        (
            "folder/types.py:three",
            "must take (prompt, sample) or slime's (args, sample, **kwargs), takes (prompt, sample, more)",
        ),
        ("folder/types.py:Scaled", "is a class; write Scaled(...) with its arguments, or name a function"),
        ("folder/types.py:number", "is 3, not a function"),
        ("broken.py:f", "raised on import: ZeroDivisionError: division by zero ({here}/broken.py, line 2)"),
        ("broken:f", "raised on import: ZeroDivisionError: division by zero ({here}/broken.py, line 2)"),
        ("leaves.py:f", "raised on import: SystemExit: 0 ({here}/leaves.py, line 1)"),
        ("unparsable.py:f", "raised on import: SyntaxError: invalid syntax (unparsable.py, line 1)"),
        (
            "needs.py:f",
            "{here}/needs.py:2 needs slime.agent, which asyncrl does not have",
        ),
        (
            "lacks.py:f",
            "{here}/lacks.py:1 needs slime.utils.types.RolloutBatch, which asyncrl does not have",
        ),
    ],
)
def test_a_wrong_path_or_shape_is_one_line(here: Path, path: str, line: str) -> None:
    (here / "broken.py").write_text("\n1 / 0\n")
    (here / "leaves.py").write_text("raise SystemExit(0)")
    (here / "unparsable.py").write_text("def")
    (here / "needs.py").write_text("from slime.utils.types import Sample\nfrom slime.agent.adapters import X")
    (here / "lacks.py").write_text("from slime.utils.types import RolloutBatch")
    with pytest.raises(PluginError) as error:
        load_reward(path, ARGS, is_group=False)
    assert str(error.value) == f"--custom-rm-path '{path}': {line.format(here=here)}"


def test_the_functions_of_a_file_are_listed(here: Path) -> None:
    with pytest.raises(PluginError) as error:
        load_reward("folder/types.py:exact", ARGS, is_group=False)
    assert f"folder/types.py has no function 'exact'; it has: {NAMES}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("keep_async", "must be written with 'def', not 'async def'"),
        ("two", "must take (group) or slime's (args, samples, **kwargs), takes (group, more)"),
    ],
)
def test_filters_have_their_own_shape(here: Path, name: str, line: str) -> None:
    with pytest.raises(PluginError) as error:
        load_plugin(f"folder/types.py:{name}", KEEP, ARGS)
    assert str(error.value) == f"--dynamic-sampling-filter-path 'folder/types.py:{name}': {line}"


def test_the_cause_of_a_failed_import_is_kept(here: Path) -> None:
    (here / "broken.py").write_text("1 / 0")
    with pytest.raises(PluginError) as error:
        load_plugin("broken.py:f", KEEP, ARGS)
    cause: Any = error.value.__cause__
    assert isinstance(cause, ZeroDivisionError)
