"""Data sources and hooks, from flags to a checked run and back from a checkpoint."""

import asyncio
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.app.checks import Checked, check
from asyncrl.app.resuming.resume import about, find_start
from asyncrl.config import RunConfig, load_run
from asyncrl.config.areas.hooks import SLIME_SOURCES
from asyncrl.data import EndlessPrompts, load_tokenizer
from asyncrl.engines.megatron.checkpoint.directory import notes_of
from asyncrl.errors import ConfigError, DataError, HookFailed, PluginError
from asyncrl.hooks.prompt_source import UserPrompts
from asyncrl.types import Prompt
from tests.unit.app.resuming.test_resume import SHAPE, STATE
from tests.unit.engines.megatron.checkpoint.test_directory import written

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"

CODE = '''
import json
import random

from asyncrl.compat import RolloutDataSource as Base, RolloutDataSourceWithBuffer as Buffered, Sample
from asyncrl.types import NewPrompt

class RolloutDataSource:
    def get_samples(self, num_samples):
        """Fetch prompts from dataset."""
        return self.dataset.sample(num_samples)

    def add_samples(self, samples):
        """Called after generation (no-op by default)."""
        pass

class RolloutDataSourceWithBuffer(RolloutDataSource):
    def __init__(self):
        self.buffer = []

    def add_samples(self, samples):
        """Store generated samples for reuse."""
        self.buffer.extend(samples)

    def buffer_filter(self, args, buffer, num_samples):
        """Custom selection logic (prioritized, stratified, etc.)."""
        return select_best(buffer, num_samples)

class Newest(Buffered):
    def buffer_filter(self, args, buffer, num_samples):
        return buffer[-num_samples:]

class Oldest(Buffered):
    def __init__(self, args):
        super().__init__(args)
        self.buffer_filter = self.pop_first
    @staticmethod
    def pop_first(args, rollout_id, buffer, num_samples):
        taken, buffer[:] = buffer[:num_samples], buffer[num_samples:]
        return taken

class Plain(Base): ...

class Edits(Base):
    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        for sample in groups[0]:
            sample.prompt = "9" + sample.prompt
        return groups

class Chats:
    def __init__(self, start=0): self.number = start
    def take(self):
        self.number += 1
        return NewPrompt(prompt=f"{self.number}+1=", label=str(self.number + 1), metadata={"x": self.value()})
    def value(self): return None
    def state(self): return {"number": self.number}
    def load(self, state): self.number = state["number"]

class NotJson(Chats):
    def value(self): return object()

class NotJsonState(Chats):
    def state(self): return {0: self.number}

class Empty(Chats):
    def take(self): return NewPrompt(prompt="")

class Messages(Chats):
    def take(self): return NewPrompt(prompt=[{"role": "user"}])

class Breaks:
    def __init__(self, args): raise OSError("no server")
    def get_samples(self, num_samples): ...

def cut(args, groups): ...
def process(args, samples): ...
'''


@pytest.fixture(autouse=True)
def _file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(CODE)


def quickstart(*flags: str) -> RunConfig:
    return load_run(["--config", str(QUICKSTART), *flags])


def checked(*flags: str) -> Checked:
    return check(quickstart(*flags))


async def take(source: Any, count: int) -> list[Prompt]:
    found = []
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(source.run())
        for _ in range(count):
            await source.ready()
            found.append(source.take())
        running.cancel()
    return found


def taken(source: Any, count: int) -> list[Prompt]:
    try:
        return asyncio.run(take(source, count))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


@pytest.mark.parametrize("path", SLIME_SOURCES)
def test_slimes_own_sources_mean_the_prompt_data(path: str) -> None:
    run = checked("--data-source-path", path)
    assert isinstance(run.prompts, EndlessPrompts)
    assert run.hooks.before_training == ()
    assert run.hooks.batch_hooks() is None
    assert run.hooks.log_hooks() is None


@pytest.mark.parametrize("name", ["RolloutDataSource", "RolloutDataSourceWithBuffer", "Newest", "Oldest", "Plain"])
def test_the_guides_classes_and_derived_ones_read_the_prompt_data_in_the_order_of_the_run(name: str) -> None:
    plain = checked().prompts
    source = checked("--data-source-path", f"mine.py:{name}").prompts
    expected = [plain.take() for _ in range(40)]
    found = taken(source, 40)
    assert [prompt.token_ids for prompt in found] == [prompt.token_ids for prompt in expected]
    assert [prompt.label for prompt in found] == [prompt.label for prompt in expected]


@pytest.mark.parametrize("name", ["Plain", "RolloutDataSource"])
def test_prompts_as_long_as_the_context_are_left_out(name: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in (9, 10)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = ("--prompt-data", str(tmp_path / "train.jsonl"), "--no-rollout-shuffle")
    flags = (*files, "--data-source-path", f"mine.py:{name}", "--rollout-max-context-len")
    assert [prompt.text for prompt in taken(checked(*flags, "6").prompts, 2)] == ["9+1=", "10+1="]
    assert [prompt.text for prompt in taken(checked(*flags, "5").prompts, 2)] == ["9+1=", "9+1="]


def test_a_prompt_that_a_derived_class_has_changed_is_answered(tmp_path: Path) -> None:
    plain = checked().prompts.take()
    source = checked("--data-source-path", "mine.py:Edits", "--data-source-prefetch", "1").prompts
    (found,) = taken(source, 1)
    assert found.text == f"9{plain.text}"
    assert found.token_ids == tuple(load_tokenizer(quickstart().model.hf_checkpoint).encode(found.text))


@pytest.mark.parametrize(("name", "first"), [("Newest", 1), ("Oldest", 0)])
def test_groups_that_come_back_are_served_first_by_the_users_filter(name: str, first: int) -> None:
    source = checked("--data-source-path", f"mine.py:{name}", "--data-source-prefetch", "1").prompts
    assert isinstance(source, UserPrompts)

    async def main() -> tuple[list[Prompt], list[Prompt]]:
        back = await take(source, 2)
        for prompt in back:
            assert source.returned(prompt, None, "stale")
        return back, await take(source, 4)

    back, found = asyncio.run(main())
    again = [prompt.text for prompt in found]
    assert again.index(back[first].text) < again.index(back[1 - first].text)


def test_a_source_that_cannot_be_made_ends_the_check() -> None:
    with pytest.raises(PluginError) as error:
        checked("--data-source-path", "mine.py:Breaks")
    file = Path.cwd() / "mine.py"
    assert str(error.value) == f"--data-source-path '{file}:Breaks': Breaks(...) raised OSError: no server"


def test_a_derived_class_reads_the_prompt_data_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text("no JSON\n")
    flags = ("--prompt-data", str(tmp_path / "broken.jsonl"), "--data-source-path")
    with pytest.raises(DataError, match=r"^[^:]*broken\.jsonl.*: not JSON"):
        checked(*flags, "mine.py:Plain")
    with pytest.raises(DataError):
        checked(*flags, "mine.py:Newest")
    checked(*flags, "mine.py:Chats")


def test_the_file_of_prompts_need_not_exist(tmp_path: Path) -> None:
    run = checked("--data-source-path", "mine.py:Chats", "--prompt-data", str(tmp_path / "none.jsonl"))
    assert [prompt.text for prompt in taken(run.prompts, 2)] == ["1+1=", "2+1="]


@pytest.mark.parametrize(
    ("name", "flags", "line"),
    [
        (
            "NotJson",
            ["--save", "saved"],
            "prompt 0: its values must be those of JSON, which --save stores: ",
        ),
        ("Empty", [], "prompt 0 has no tokens"),
        ("Messages", [], "a prompt must be text or a list of messages: "),
    ],
)
def test_prompts_that_cannot_be_used_are_named(name: str, flags: list[str], line: str) -> None:
    with pytest.raises(HookFailed) as error:
        taken(checked("--data-source-path", f"mine.py:{name}", *flags).prompts, 1)
    assert str(error.value).startswith(f"--data-source-path {Path.cwd()}/mine.py:{name}: {line}")


def test_a_state_that_checkpoints_cannot_store_ends_the_check() -> None:
    line = r"^--data-source-path .*mine\.py:NotJsonState: state\(\) must return JSON values"
    with pytest.raises(HookFailed, match=line):
        checked("--data-source-path", "mine.py:NotJsonState", "--save", "saved")
    checked("--data-source-path", "mine.py:NotJsonState")


def test_groups_that_came_back_are_in_the_checkpoint_of_slimes_source(tmp_path: Path) -> None:
    flags = ("--data-source-path", "mine.py:Newest", "--data-source-prefetch", "1", "--save", str(tmp_path))

    async def main() -> tuple[list[Prompt], list[Prompt]]:
        source, resumed = checked(*flags).prompts, checked(*flags, "--load", str(tmp_path)).prompts
        assert isinstance(source, UserPrompts)
        assert isinstance(resumed, UserPrompts)
        back = await take(source, 2)
        for prompt in back:
            assert source.returned(prompt, None, "stale")
        async with source.saved(1) as state:
            assert state.ahead == ()
        resumed.restore(1, state.fetched, state.state)
        return back, await take(resumed, 3)

    back, found = asyncio.run(main())
    assert {prompt.text for prompt in back} == {prompt.text for prompt in found[:2]}
    assert {prompt.label for prompt in back} == {prompt.label for prompt in found[:2]}
    assert found[2].text not in {prompt.text for prompt in back}


def test_anything_may_be_in_the_metadata_without_checkpoints() -> None:
    assert taken(checked("--data-source-path", "mine.py:NotJson").prompts, 1)[0].metadata["x"] is not None


def test_hooks_are_loaded_in_their_order_and_checked() -> None:
    flags = ("--custom-reward-post-process-path", "mine.py:process", "--rollout-sample-filter-path", "mine.py:cut")
    hooks = checked(*flags).hooks
    assert [each.flag for each in hooks.before_training] == [
        "--rollout-sample-filter-path",
        "--custom-reward-post-process-path",
    ]
    assert hooks.batch_hooks() is not None
    file = re.escape(f"{Path.cwd()}/mine.py")
    with pytest.raises(PluginError, match=f"^--custom-rollout-log-function-path '{file}:gone': {file} has no function"):
        checked("--custom-rollout-log-function-path", "mine.py:gone")


def test_one_answer_per_prompt_is_enough_for_a_users_comparison() -> None:
    with pytest.raises(ConfigError, match="n-samples-per-prompt must be at least 2"):
        quickstart("--n-samples-per-prompt", "1")
    quickstart("--n-samples-per-prompt", "1", "--custom-reward-post-process-path", "mine.py:process")


# ---- resuming


def saved(folder: Path, source: Any, prompts: tuple[Prompt, ...], state: Any) -> None:
    before = replace(STATE, outstanding=(), prompts=prompts, source={"fetched": 20, "state": state})
    run = {**about(source), "optimizer": True, "state": json.loads(json.dumps(before.as_json()))}
    written(folder / "saved", 2, notes_of(SHAPE, run))


def test_a_run_resumes_with_the_sources_state_and_its_prompts(tmp_path: Path) -> None:
    flags = ("--data-source-path", "mine.py:Chats", "--load", str(tmp_path / "saved"))
    source = checked("--data-source-path", "mine.py:Chats").prompts
    outstanding = Prompt(row=7, epoch=0, text="7+1=", token_ids=(1, 2), label="8", metadata={"x": None})
    saved(tmp_path, source, (outstanding,), {"number": 20})
    run = quickstart(*flags)
    resumed = checked("--data-source-path", "mine.py:Chats").prompts
    start = find_start(run, resumed, SHAPE)
    assert start.again == (outstanding,)
    assert [(prompt.text, prompt.row) for prompt in taken(resumed, 2)] == [("21+1=", 20), ("22+1=", 21)]


def test_a_run_resumes_after_its_folder_has_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, checked("--data-source-path", "mine.py:Chats").prompts, (), {"number": 20})
    (tmp_path / "moved").mkdir()
    (tmp_path / "mine.py").rename(tmp_path / "moved" / "mine.py")
    monkeypatch.chdir(tmp_path / "moved")
    run = quickstart("--data-source-path", "mine.py:Chats", "--load", str(tmp_path / "saved"))
    prompts = checked("--data-source-path", "mine.py:Chats").prompts
    find_start(run, prompts, SHAPE)
    assert taken(prompts, 1)[0].text == "21+1="


def test_another_source_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, checked("--data-source-path", "mine.py:Chats").prompts, (), None)
    run = quickstart("--data-source-path", "mine.py:Plain", "--load", str(tmp_path / "saved"))
    for prompts in (checked("--data-source-path", "mine.py:Plain").prompts, checked().prompts):
        with pytest.raises(ConfigError, match=r"^--data-source-path: .* was made with another source of prompts"):
            find_start(run, prompts, SHAPE)
