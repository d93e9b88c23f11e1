"""Hooks, log functions and data sources by path: both shapes load, others are refused before anything starts."""

import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.compat import SlimeArgs
from asyncrl.compat.data_sources import SlimeSource
from asyncrl.errors import PluginError
from asyncrl.hooks.native_source import NativeSource
from asyncrl.plugins import (
    ALL_SAMPLES,
    CONVERT,
    EVAL_LOG,
    POST_PROCESS,
    ROLLOUT_LOG,
    SAMPLE_FILTER,
    Kind,
    load_plugin,
    load_source,
)
from asyncrl.types import Batch, EvalReport, Weights
from tests.unit.scored_groups import group

ARGS = SlimeArgs(n_samples_per_prompt=2, lr=0.5, prompt_data="here.jsonl")
REPORT = EvalReport(
    weights=Weights(version=0, step=0), newest=Weights(version=0, step=0), accuracy={}, num_samples=0, num_failed=0,
    num_tokens=0, seconds=0.0,
)  # fmt: skip

CODE = """
from asyncrl.types import NewPrompt

def filter_ours(step, groups): return [(groups[0].group_id, 0)]
def filter_slimes(args, data): data[0][0].remove_sample = True
def all_ours(step, trained, filtered): ...
def all_slimes(args, all_groups, data_source): ...
def post_ours(groups): return [[1.0, 2.0]]
def post_slimes(args, samples): return [0.0, 0.0], [1.0, 2.0]
def convert_ours(batch): return batch
def convert_slimes(args, samples): return {"rewards": [1.0, 2.0]}
def log_ours(step, batch, row): return {"a": 1}
def log_slimes(rollout_id, args, samples, rollout_extra_metrics, rollout_time): return True
def eval_ours(step, report, row): return {"b": 1}
def eval_slimes(rollout_id, args, data, extra_metrics): return False

async def waits(args, samples): ...
def none(): ...
def only(args): ...

class WithArgs:
    def __init__(self, args): self.path = args.prompt_data
    def get_samples(self, num_samples): return []

class RolloutDataSource:
    def get_samples(self, num_samples): return self.dataset.sample(num_samples)
    def add_samples(self, samples): pass

class RolloutDataSourceWithBuffer(RolloutDataSource):
    def __init__(self): self.buffer = []
    def add_samples(self, samples): self.buffer.extend(samples)

class Ours:
    def __init__(self, path="x", start=0): self.path = path
    def take(self): return NewPrompt(prompt=self.path)

class Needs:
    def __init__(self, path, level): ...
    def take(self): ...

class Breaks:
    def __init__(self): raise OSError("no disk")
    def take(self): ...

class Other: ...

def endless():
    while True:
        yield NewPrompt(prompt="a")

def made(args): return Ours(args.prompt_data)
def makes_other(): return 3
ready = Ours("r")
number = 3
"""


@pytest.fixture(autouse=True)
def _file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(CODE)


def batch() -> Batch:
    return Batch(step=4, groups=(group(3, (0.0, 1.0)),))


def loaded(name: str, kind: Kind[Any]) -> Any:
    return load_plugin(f"mine.py:{name}", kind, ARGS)


@pytest.mark.parametrize("name", ["filter_ours", "filter_slimes"])
def test_sample_filters(name: str) -> None:
    changed = loaded(name, SAMPLE_FILTER)(batch(), ())
    assert [scored.loss_mask for scored in changed.groups[0].samples] == [(0,), (1,)]


@pytest.mark.parametrize("name", ["all_ours", "all_slimes"])
def test_all_samples(name: str) -> None:
    assert loaded(name, ALL_SAMPLES)(batch(), ()) == batch()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("post_ours", POST_PROCESS), ("post_slimes", POST_PROCESS), ("convert_slimes", CONVERT)],
)
def test_outcomes(name: str, kind: Kind[Any]) -> None:
    changed = loaded(name, kind)(batch(), ())
    assert [scored.outcome for scored in changed.groups[0].samples] == [1.0, 2.0]


def test_conversions() -> None:
    assert loaded("convert_ours", CONVERT)(batch(), ()) == batch()


@pytest.mark.parametrize(("name", "expected"), [("log_ours", {"a": 1}), ("log_slimes", None)])
def test_rollout_logs(name: str, expected: Any) -> None:
    function = loaded(name, ROLLOUT_LOG)
    assert function(4, batch(), {"step": 4}) == expected
    assert function.__name__ == name


@pytest.mark.parametrize(("name", "expected"), [("eval_ours", {"b": 1}), ("eval_slimes", None)])
def test_eval_logs(name: str, expected: Any) -> None:
    assert loaded(name, EVAL_LOG)(4, REPORT, {"step": 4}) == expected


@pytest.mark.parametrize(
    ("name", "kind", "line"),
    [
        ("waits", CONVERT, "must be written with 'def', not 'async def'"),
        ("none", SAMPLE_FILTER, "must take (step, groups) or slime's (args, groups, **kwargs), takes ()"),
        ("only", POST_PROCESS, "must take (groups) or slime's (args, samples, **kwargs), takes (args)"),
        ("all_ours", ROLLOUT_LOG, None),
        ("log_ours", EVAL_LOG, None),
        ("filter_ours", ROLLOUT_LOG,
         "must take (step, batch, row) or slime's (rollout_id, args, samples, extra_metrics, rollout_time, **kwargs), "
         "takes (step, groups)"),
        ("eval_slimes", ROLLOUT_LOG,
         "must take (step, batch, row) or slime's (rollout_id, args, samples, extra_metrics, rollout_time, **kwargs), "
         "takes (rollout_id, args, data, extra_metrics)"),
        ("Other", CONVERT, "is a class; write Other(...) with its arguments, or name a function"),
    ],
)  # fmt: skip
def test_other_shapes_are_refused(name: str, kind: Kind[Any], line: str | None) -> None:
    if line is None:  # the number of parameters is all that can be checked
        assert callable(loaded(name, kind))
        return
    with pytest.raises(PluginError) as error:
        loaded(name, kind)
    assert str(error.value) == f"{kind.flag} 'mine.py:{name}': {line}"


@pytest.mark.parametrize("name", ["WithArgs", "RolloutDataSource", "RolloutDataSourceWithBuffer"])
def test_sources_of_slimes_shape(name: str) -> None:
    assert isinstance(load_source(f"mine.py:{name}", ARGS)(), SlimeSource)


@pytest.mark.parametrize(
    ("name", "text"),
    [("Ours", "x"), ("Ours('y')", "y"), ("Ours(path='z', start=3)", "z"), ("endless", "a"), ("made", "here.jsonl"),
     ("ready", "r")],
)  # fmt: skip
def test_native_sources(name: str, text: str) -> None:
    source = load_source(f"mine.py:{name}", ARGS)()
    assert isinstance(source, NativeSource)
    assert [new.prompt for new in source.fetch(2, 0)] == [text, text]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Needs", "Needs takes path, level; write Needs(...) with its arguments"),
        ("Other", "the class Other has no take(), an iterator, or slime's get_samples(num_samples)"),
        ("number", "is 3, which has no take(), an iterator, or slime's get_samples(num_samples)"),
        ("gone", "mine.py has no function 'gone'; it has: "),
    ],
)
def test_sources_that_cannot_be_made_are_refused_without_making_them(name: str, line: str) -> None:
    with pytest.raises(PluginError) as error:
        load_source(f"mine.py:{name}", ARGS)
    assert str(error.value).startswith(f"--data-source-path 'mine.py:{name}': {line}")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Breaks", "Breaks(...) raised OSError: no disk"),
        ("makes_other", "made a int, which has no take(), an iterator, or slime's get_samples(num_samples)"),
        (
            "Ours(nothing=3)",
            "Ours(nothing=3): got an unexpected keyword argument 'nothing'; it takes (path='x', start=0)",
        ),
    ],
)
def test_sources_that_fail_when_made_are_named(name: str, line: str) -> None:
    with pytest.raises(PluginError) as error:
        load_source(f"mine.py:{name}", ARGS)()
    assert str(error.value) == f"--data-source-path 'mine.py:{name}': {line}"
