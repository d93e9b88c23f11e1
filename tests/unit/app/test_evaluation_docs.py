"""The examples of docs/evaluation.md run as they are printed."""

import asyncio
import io
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from asyncrl.app.dry_run import dry_run
from asyncrl.compat import BlockingEval, SlimeArgs
from asyncrl.config import load_run
from asyncrl.config.eval_file import KEYS
from asyncrl.config.eval_sets import eval_sets
from asyncrl.plugins import EVAL, load_plugin

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "evaluation.md").read_text()
FILES = dict(re.findall(r"```\w+\n# (\w+\.\w+)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = re.findall(r"^uv run train_async\.py (.*)$", PAGE, re.MULTILINE)
FUNCTIONS = re.findall(r"^--eval-function-path (\S+)$", PAGE, re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files, from which the repository's configurations look as from its root."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_pass_a_dry_run(command: str, folder: Path) -> None:
    output = io.StringIO()
    dry_run(load_run([*shlex.split(command), "--dry-run"]), Console(file=output, width=200))
    assert "the dry run found nothing wrong" in output.getvalue()


def test_both_forms_of_the_file_have_the_same_sets(folder: Path) -> None:
    first, second = (
        eval_sets(load_run(shlex.split(COMMANDS[1].replace("sets.yaml", name)))) for name in ("sets.yaml", "sets.toml")
    )
    assert [each.name for each in first] == ["sums", "sums_greedy"]
    assert [(each.name, each.temperature, each.reward, each.data) for each in first] == [
        (each.name, each.temperature, each.reward, each.data) for each in second
    ]


def test_the_page_lists_every_key_of_a_set() -> None:
    table = PAGE.partition("| key | like the flag |")[2].partition("\n\n")[0]
    assert {*KEYS, "name", "path", "metadata_overrides"} == set(re.findall(r"`([a-z_]+)`", table))


def test_the_native_function_returns_rewards_by_set(folder: Path) -> None:
    async def generate(name: str, prompt: str, index: int) -> str:
        return f"{name}{prompt}{index}"

    async def score(name: str, prompt: str, sample: str) -> float:
        return float(sample[-1])

    evaluation = SimpleNamespace(prompts={"a": ("p", "q")}, generate=generate, score=score)
    function: Any = load_plugin(FUNCTIONS[0], EVAL, SlimeArgs())
    assert asyncio.run(function(evaluation)) == {"a": [1.0, 1.0]}


def test_the_function_of_slimes_shape_asks_the_router(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def urlopen(request: Any, timeout: float) -> Any:
        asked.append(request.full_url)
        return io.BytesIO(b'{"meta_info": {"completion_tokens": 7}}')

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    (folder / "rows.jsonl").write_text('{"prompt": "1+1="}')
    data_set = SimpleNamespace(name="a", path="rows.jsonl", temperature=1.0, max_response_len=7, input_key="prompt")
    function = load_plugin(FUNCTIONS[1], EVAL, SlimeArgs())
    assert isinstance(function, BlockingEval)
    args = {"eval_datasets": [data_set], "sglang_router_ip": "10.0.0.1", "sglang_router_port": 3000}
    outcome = function(5, args)
    assert (outcome.rewards, outcome.truncated, outcome.metrics) == ({"a": (-7.0,)}, {"a": 1.0}, {"step_seen": 4.0})
    assert asked == ["http://10.0.0.1:3000/generate"]
