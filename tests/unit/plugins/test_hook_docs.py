"""The examples of data sources, hooks and log functions in docs/plugins.md load and run as they are printed."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.compat import SlimeArgs
from asyncrl.plugins import (
    ALL_SAMPLES,
    CONVERT,
    EVAL_LOG,
    POST_PROCESS,
    ROLLOUT_LOG,
    SAMPLE_FILTER,
    load_plugin,
    load_source,
)
from asyncrl.types import Batch, EvalReport, Weights
from tests.unit.plugins.test_plugins_docs import FILES, named_after
from tests.unit.scored_groups import group

ARGS = SlimeArgs(n_samples_per_prompt=2, prompt_data="easy.jsonl", reward_key=None)
SOURCES = {
    'my_source.py:Curriculum("easy.jsonl", "hard.jsonl", above=0.7)': "easy 0",
    'my_source.py:Replay("easy.jsonl", share=0.1)': "easy 0",
    "my_source.py:sums": None,
    "slime_source.py:Buffered": "easy 0",
}
HOOKS = {
    "my_hooks.py:no_cut": (SAMPLE_FILTER, [(0, 0), (1, 1)], [None, None]),
    "slime_hooks.py:no_cut": (SAMPLE_FILTER, [(0, 0), (1, 1)], [None, None]),
    'my_hooks.py:to_file("answers.jsonl")': (ALL_SAMPLES, [(1, 1), (1, 1)], [None, None]),
    "slime_hooks.py:count": (ALL_SAMPLES, [(1, 1), (1, 1)], [None, None]),
    "my_hooks.py:less_median": (POST_PROCESS, [(1, 1), (1, 1)], [-0.5, 0.5]),
    "slime_hooks.py:halves": (POST_PROCESS, [(1, 1), (1, 1)], [-0.5, 0.5]),
    "my_hooks.py:first_tokens(256)": (CONVERT, [(1, 1), (1, 1)], [None, None]),
    "slime_hooks.py:to_train_data": (CONVERT, [(1, 1), (1, 1)], [-0.5, 0.5]),
}
LOGS = {"my_logs.py:lengths": {"my/shortest_answer": 2}, "slime_logs.py:log_rollout": {"my/longest_answer": 2.0}}
EVAL_LOGS = {"my_logs.py:worst_set": {"my/worst_set": 0.25}, "slime_logs.py:log_eval": None}


def batch() -> Batch:
    return Batch(step=4, groups=(group(3, (0.0, 1.0), (2, 2), num_cut=1),))


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    for level in ("easy", "hard"):
        rows = [{"prompt": f"{level} {number}", "label": str(number)} for number in range(3)]
        (tmp_path / f"{level}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def test_every_example_is_tested() -> None:
    flags = [kind.flag.removeprefix("--") for kind in (SAMPLE_FILTER, ALL_SAMPLES, POST_PROCESS, CONVERT)]
    assert sorted(path for flag in flags for path in named_after(flag)) == sorted(HOOKS)
    assert sorted(named_after("data-source-path")) == sorted(SOURCES)
    assert sorted(named_after("custom-rollout-log-function-path")) == sorted(LOGS)
    assert sorted(named_after("custom-eval-rollout-log-function-path")) == sorted(EVAL_LOGS)


@pytest.mark.parametrize("path", SOURCES)
def test_data_sources(path: str) -> None:
    source = load_source(path, ARGS)()
    first, *_ = given = list(source.fetch(5, 0))
    if source.wants_returned:
        assert source.give_back(_answered({}, (0.0, 0.0)).prompt, None, given[3].origin)
    if SOURCES[path] is not None:
        assert first.prompt == SOURCES[path]
    state = json.loads(json.dumps(source.state(4)))
    again = load_source(path, ARGS)()
    if state is not None or "slime" in path:
        again.load(4, state)
        assert [new.prompt for new in again.fetch(2, 5)] == [new.prompt for new in source.fetch(2, 5)]


def test_the_curriculum_moves_on_and_the_replay_repeats() -> None:
    curriculum = load_source('my_source.py:Curriculum("easy.jsonl", "hard.jsonl", above=0.7)', ARGS)()
    for number in range(40):
        (new,) = curriculum.fetch(1, number)
        curriculum.finished(_answered(new.metadata, (1.0, 1.0)))
    assert str(curriculum.fetch(1, 40)[0].prompt).startswith("hard")
    replay = load_source('my_source.py:Replay("easy.jsonl", share=1.0)', ARGS)()
    replay.finished(_answered({}, (0.0, 0.5)))
    assert replay.fetch(1, 0)[0].prompt == "bad"


def _answered(metadata: Any, rewards: tuple[float, float]) -> Any:
    made = group(1, rewards)
    return replace(made, prompt=replace(made.prompt, text="bad", metadata=metadata))


@pytest.mark.parametrize("path", HOOKS)
def test_hooks(path: str) -> None:
    kind, masks, outcomes = HOOKS[path]
    (changed,) = load_plugin(path, kind, ARGS)(batch(), ()).groups
    assert [scored.loss_mask for scored in changed.samples] == masks
    assert [scored.outcome for scored in changed.samples] == outcomes


@pytest.mark.parametrize("path", LOGS)
def test_log_functions(path: str) -> None:
    assert load_plugin(path, ROLLOUT_LOG, ARGS)(4, batch(), {"step": 4}) == LOGS[path]


@pytest.mark.parametrize("path", EVAL_LOGS)
def test_eval_log_functions(path: str) -> None:
    plain, now = group(3, (0.0, 1.0)), Weights(version=4, step=4)
    report = EvalReport(
        weights=now, newest=now, accuracy={"a": 0.5, "b": 0.25}, num_samples=2, num_failed=0, num_tokens=2, seconds=1.0,
        answers={"a": tuple((plain.prompt, scored) for scored in plain.samples)},
    )  # fmt: skip
    assert load_plugin(path, EVAL_LOG, ARGS)(4, report, {"step": 4}) == EVAL_LOGS[path]
