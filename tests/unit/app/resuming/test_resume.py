from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from asyncrl.app import entry
from asyncrl.app.resuming.binding import binding
from asyncrl.app.resuming.resume import Start, about, find_start
from asyncrl.buffer.journal import Admitted, PromptPlace, Record, Snapshot
from asyncrl.config import RunConfig, load_run
from asyncrl.config.resolved import kept
from asyncrl.data import EndlessPrompts
from asyncrl.engines.megatron.checkpoint.directory import notes_of
from asyncrl.errors import ConfigError
from asyncrl.hooks.native_source import NativeSource
from asyncrl.metrics.facts import GroupCounts, TokenCounts
from asyncrl.models.shape import read_shape
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.types import GroupId, Prompt, Weights
from tests.unit.buffer.journal.made import grown
from tests.unit.data.prompt_files import config, jsonl, numbered_rows, stream, take
from tests.unit.engines.megatron.checkpoint.test_directory import written
from tests.unit.hooks.test_prompt_source import Counting, taken, texts
from tests.unit.hooks.test_prompt_source import prompts as user_prompts
from tests.unit.pipeline.test_recovery import write
from tests.virtual_time import run_virtually

MODEL = Path(__file__).parents[4] / "configs" / "quickstart" / "model"
SHAPE = read_shape(MODEL)
STATE = RunState(
    step=2,
    version=2,
    next_id=12,
    prompts_taken=12,
    outstanding=((0, 4), (1, 0)),
    tokens=TokenCounts(generated=100, trained=80, stale=20),
    groups=GroupCounts(admitted=12, trained=10, stale=2),
    reasons={},
    verdicts=(True,) * 10,
    retries=1,
    aborts=0,
)


def prompts(count: int = 10, seed: int | None = 1) -> EndlessPrompts:
    return EndlessPrompts(
        [Prompt(row=row, epoch=0, text="", token_ids=(row, 1), label=None) for row in range(count)], seed
    )


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., RunConfig]:
    (tmp_path / "train.jsonl").touch()

    def run(*more: str) -> RunConfig:
        words = "--num-rollout 3 --rollout-batch-size 5 --n-samples-per-prompt 4 --label-key label --rm-type exact"
        files = ["--hf-checkpoint", str(MODEL), "--prompt-data", str(tmp_path / "train.jsonl")]
        return load_run([*words.split(), *files, "--load", str(tmp_path / "saved"), *more])

    return run


def saved(folder: Path, changes: dict[str, Any] | None = None, source: EndlessPrompts | None = None) -> Path:
    run = {**about(source or prompts()), "optimizer": True, "state": STATE.as_json(), **(changes or {})}
    return written(folder / "saved", 2, notes_of(SHAPE, run))


@pytest.mark.parametrize(("loads", "end"), [("saved", "command"), ("elsewhere", "command with --load {folder}")])
def test_an_interrupted_run_names_load_only_if_the_command_had_another(
    configured: Callable[..., RunConfig], tmp_path: Path, loads: str, end: str
) -> None:
    saved(tmp_path)
    run = configured("--save", str(tmp_path / "saved"), "--load", str(tmp_path / loads))
    said = entry._interruption(run, 2, "SIGINT")  # noqa: SLF001
    assert said.endswith(f"; to resume, repeat the {end.format(folder=tmp_path / 'saved')}")


def test_a_critic_cannot_resume_from_a_checkpoint_without_one(
    configured: Callable[..., RunConfig], tmp_path: Path
) -> None:
    folder = saved(tmp_path, {"critic": False})
    with pytest.raises(ConfigError, match=f"^advantage-estimator ppo: {folder} has no critic; --ref-load takes"):
        find_start(configured("--advantage-estimator", "ppo"), prompts(), SHAPE)
    assert find_start(configured(), prompts(), SHAPE).step == 2


@pytest.mark.parametrize("noted", [{}, {"critic": True}])
def test_a_critic_resumes(configured: Callable[..., RunConfig], tmp_path: Path, noted: dict[str, bool]) -> None:
    saved(tmp_path, noted)
    assert find_start(configured("--advantage-estimator", "ppo"), prompts(), SHAPE).step == 2


def test_a_run_without_a_trainer_starts_from_the_weights_that_its_engines_read(
    configured: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run = configured("--ref-load", str(MODEL))
    assert find_start(run, prompts(), SHAPE).origin is not None
    alone = replace(run, debug=replace(run.debug, debug_rollout_only=True))
    assert find_start(alone, prompts(), SHAPE) == Start()


def test_a_new_run_starts_at_its_beginning(configured: Callable[..., RunConfig]) -> None:
    source = prompts()
    assert find_start(configured(), source, SHAPE) == Start()
    assert Start().step == 0
    assert Start().weights == Weights(version=0, step=0)
    assert source.position == 0


def test_a_run_that_saves_knows_its_prompts(tmp_path: Path, configured: Callable[..., RunConfig]) -> None:
    assert find_start(configured(), prompts(), SHAPE).about == {}
    run = configured("--save", str(tmp_path / "new"))
    noted = find_start(run, prompts(), SHAPE).about
    assert noted == {**about(prompts()), "critic": False, "settings": kept(run)}


def test_a_run_resumes_at_its_position(tmp_path: Path, configured: Callable[..., RunConfig]) -> None:
    folder, source = saved(tmp_path), prompts()
    start = find_start(configured(), source, SHAPE)
    assert start.origin is not None
    assert (start.origin.folder, start.origin.optimizer) == (folder, True)
    assert start.before == STATE
    assert [(prompt.epoch, prompt.row) for prompt in start.again] == [(0, 4), (1, 0)]
    assert (start.step, start.weights) == (2, Weights(version=3, step=2))
    assert source.position == 12


def test_an_optimizer_that_was_not_saved_is_not_loaded(tmp_path: Path, configured: Callable[..., RunConfig]) -> None:
    saved(tmp_path, {"optimizer": False})
    origin = find_start(configured(), prompts(), SHAPE).origin
    assert origin is not None
    assert not origin.optimizer


@pytest.mark.parametrize("source", [prompts(11), prompts(seed=2), prompts(seed=None)])
def test_other_prompts_are_refused(
    tmp_path: Path, configured: Callable[..., RunConfig], source: EndlessPrompts
) -> None:
    saved(tmp_path, source=source)
    with pytest.raises(ConfigError, match=rf"made with other prompts \({len(source)} of them, here 10\)"):
        find_start(configured(), prompts(), SHAPE)


def test_a_run_that_is_done_is_refused(tmp_path: Path, configured: Callable[..., RunConfig]) -> None:
    saved(tmp_path)
    with pytest.raises(
        ConfigError, match=r"num-rollout 2: .*iter_0000002 has done 2 steps; num-rollout counts those"
    ) as error:
        find_start(configured("--num-rollout", "2"), prompts(), SHAPE)
    assert f"convert to-hf {tmp_path / 'saved'} TARGET --hf-checkpoint " in str(error.value)


def test_broken_notes_are_refused(tmp_path: Path, configured: Callable[..., RunConfig]) -> None:
    folder = saved(tmp_path, {"state": {}})
    with pytest.raises(ConfigError, match=r"iter_0000002: not a state of a run"):
        find_start(configured(), prompts(), SHAPE)
    for name in ("run.json", "checksums.json"):  # another program wrote the checkpoint
        (folder / name).unlink()
    with pytest.raises(ConfigError, match=r"has no run.json.*--ref-load takes its weights"):
        find_start(configured(), prompts(), SHAPE)


# ---- the run before


def test_a_resumed_run_says_what_changed(tmp_path: Path, configured: Callable[..., RunConfig]) -> None:
    saved(tmp_path, {"settings": kept(configured("--lr", "1e-5", "--save-interval", "5", "--save", "x"))})
    assert find_start(configured("--lr", "1e-5"), prompts(), SHAPE).changes == ()
    found = find_start(configured("--lr", "2e-5", "--eval-timeout-s", "7"), prompts(), SHAPE).changes
    assert found == (
        "changed since the checkpoint: lr 1e-05 → 2e-05",
        "changed since the checkpoint, without effect on training: eval-timeout-s",
    )


def test_a_checkpoint_without_settings_resumes(tmp_path: Path, configured: Callable[..., RunConfig]) -> None:
    saved(tmp_path)
    (line,) = find_start(configured(), prompts(), SHAPE).changes
    assert line == "the checkpoint has no settings to compare with: an earlier version of asyncrl wrote it"


def test_a_checkpoint_of_an_earlier_version_resumes(tmp_path: Path, configured: Callable[..., RunConfig]) -> None:
    """A real ``run.json``, written before checkpoints had a schema, settings, checksums and later fields."""
    notes = orjson.loads((Path(__file__).parent / "recorded" / "run_ebef004.json").read_bytes())
    assert "schema" not in notes
    notes["run"] |= about(prompts())  # of the prompts here
    folder = written(tmp_path / "saved", 4, orjson.dumps(notes))
    (folder / "checksums.json").unlink()
    start = find_start(configured("--num-rollout", "9"), prompts(), SHAPE)
    assert start.before is not None
    assert (start.step, start.before.next_id, start.before.tokens.trained) == (4, 64, 3944)
    assert (start.before.last_taken, start.before.source, start.before.tokens.observed) == (None, None, 0)
    assert start.weights == Weights(version=4, step=4)


def test_a_checkpoint_of_a_later_version_is_one_line(tmp_path: Path, configured: Callable[..., RunConfig]) -> None:
    run = {**about(prompts()), "optimizer": True, "state": {**STATE.as_json(), "mood": "good"}}
    notes = orjson.loads(notes_of(SHAPE, run))
    folder = written(tmp_path / "saved", 2, orjson.dumps(notes))
    assert find_start(configured(), prompts(), SHAPE).before == STATE  # fields that it does not know are ignored
    written(tmp_path / "saved", 2, orjson.dumps({**notes, "schema": 99}))
    with pytest.raises(ConfigError) as error:
        find_start(configured(), prompts(), SHAPE)
    line = "a later version of asyncrl wrote it (schema 99, here 1); update asyncrl"
    assert str(error.value) == f"{folder / 'run.json'}: {line}"


def test_another_model_is_refused(tmp_path: Path, configured: Callable[..., RunConfig]) -> None:
    run = {**about(prompts()), "optimizer": True, "state": STATE.as_json()}
    written(tmp_path / "saved", 2, notes_of(replace(SHAPE, num_layers=77), run))
    with pytest.raises(ConfigError, match=r"is of another model than hf-checkpoint: num_layers 77"):
        find_start(configured(), prompts(), SHAPE)


def test_weights_alone_start_a_new_run(tmp_path: Path, configured: Callable[..., RunConfig]) -> None:
    folder, source = saved(tmp_path), prompts()
    run = configured("--ref-load", str(folder), "--load", str(tmp_path / "none"))
    start = find_start(run, source, SHAPE)
    assert start.origin is not None
    assert (start.origin.folder, start.origin.kind) == (folder, "weights")
    assert start.before is None
    assert source.position == 0


def test_a_stream_continues_behind_the_prompt_taken_last(configured: Callable[..., RunConfig], tmp_path: Path) -> None:
    data = config(jsonl(tmp_path / "rows.jsonl", numbered_rows(10)), rollout_shuffle=True, num_data_workers=1)
    taken = take(stream(tmp_path, data), 20)
    again = [(prompt.epoch, prompt.row) for prompt in (taken[3], taken[10])]
    state = replace(STATE, outstanding=tuple(again), last_taken=(taken[11].epoch, taken[11].row))
    source = stream(tmp_path, data)
    run = {**about(source), "optimizer": True, "state": state.as_json()}
    written(tmp_path / "saved", 2, notes_of(SHAPE, run))
    start = find_start(configured(), source, SHAPE)
    assert start.again == (taken[3], taken[10])
    assert take(source, 8) == taken[12:]


def test_outstanding_prompts_are_read_again_in_the_order_of_the_files(
    configured: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Going back in a Parquet row group would read it again from its start."""
    outstanding = ((0, 7), (1, 2), (0, 9), (0, 2))
    saved(tmp_path, {"state": replace(STATE, outstanding=outstanding).as_json()})
    source, read = prompts(), list[int]()

    class Reading(EndlessPrompts):
        def at(self, epoch: int, row: int) -> Prompt:
            read.append(row)
            return super().at(epoch, row)

    start = find_start(configured(), Reading(source.rows, 1), SHAPE)
    assert [(prompt.epoch, prompt.row) for prompt in start.again] == list(outstanding)
    assert read == [2, 2, 7, 9]


def test_a_stream_of_other_files_is_refused(configured: Callable[..., RunConfig], tmp_path: Path) -> None:
    source = stream(tmp_path, config(jsonl(tmp_path / "rows.jsonl", numbered_rows(10))))
    run = {**about(source), "optimizer": True, "state": STATE.as_json()}
    written(tmp_path / "saved", 2, notes_of(SHAPE, run))
    other = stream(tmp_path, config(jsonl(tmp_path / "other.jsonl", numbered_rows(11))))
    with pytest.raises(ConfigError, match="was made with other prompts"):
        find_start(configured(), other, SHAPE)


def test_a_row_that_is_not_in_the_files_is_refused(configured: Callable[..., RunConfig], tmp_path: Path) -> None:
    source = stream(tmp_path, config(jsonl(tmp_path / "rows.jsonl", numbered_rows(10))))
    state = replace(STATE, outstanding=(), last_taken=(0, 10**9))
    run = {**about(source), "optimizer": True, "state": state.as_json()}
    written(tmp_path / "saved", 2, notes_of(SHAPE, run))
    with pytest.raises(ConfigError, match="the files have no row 1000000000, with which the checkpoint's run ended"):
        find_start(configured(), source, SHAPE)


def test_a_users_source_continues_behind_the_prompts_of_the_journal(
    configured: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Prompts 0 to 5 were given at the checkpoint, of which 4 and 5 waited; 5, 6 and 7 started before the kill."""

    def made(number: int) -> Prompt:
        return Prompt(row=number, epoch=0, text=str(number), token_ids=(1,), label=number, metadata={"a": 1})

    run, source = configured("--save", str(tmp_path / "saved")), user_prompts(NativeSource(Counting()))
    state = replace(STATE, outstanding=(), prompts=(made(4), made(5)), source={"fetched": 6, "state": 6}, mark="m")
    notes = {**about(source), "optimizer": True, "state": state.as_json()}
    written(tmp_path / "saved", 2, notes_of(SHAPE, notes))
    at_checkpoint = {**state.as_json(), "about": {**about(source), **binding(run)}}
    records: list[Record] = [Snapshot(step=2, state=orjson.loads(orjson.dumps(at_checkpoint)), held=())]
    records += [
        Admitted(
            group_id=GroupId(7 + number),
            place=PromptPlace(epoch=0, row=number, prompt=made(number)),
            prompts_taken=7 + number,
            last_taken=(0, number),
        )
        for number in (5, 6, 7)
    ]
    write(tmp_path / "saved" / "journal", 1, [*records], 100)
    start = find_start(run, source, SHAPE)
    assert start.restored is not None
    assert [each.prompt for each in start.restored.in_flight] == [made(5), made(6), made(7)]
    assert start.again == (made(4),)
    assert source.at_start().given == (made(6), made(7))
    found, _ = run_virtually(taken(source, 3))
    assert texts(found) == ["8", "9", "10"]
    assert [prompt.row for prompt in found] == [10, 11, 12], "no row is used twice"


def test_episodes_do_not_continue_answers_of_a_run_without_them(
    configured: Callable[..., RunConfig], tmp_path: Path
) -> None:
    words = ("--save", str(tmp_path / "saved"))
    run, episodes = configured(*words), configured(*words, "--custom-generate-function-path", "mine.generate")
    source = prompts()
    saved(tmp_path, source=source)
    at_checkpoint = {**STATE.as_json(), "about": {**about(source), **binding(run)}}
    records: list[Record] = [
        Snapshot(step=2, state=orjson.loads(orjson.dumps(at_checkpoint)), held=()),
        Admitted(group_id=GroupId(7), place=PromptPlace(epoch=0, row=1), prompts_taken=7, last_taken=(0, 1)),
        grown(7, 0, 3),
    ]
    write(tmp_path / "saved" / "journal", 1, [*records], 100)
    for each, num_tokens in ((run, 3), (episodes, 0)):
        restored = find_start(each, source, SHAPE).restored
        assert restored is not None
        assert [(group.group_id, group.num_tokens) for group in restored.in_flight] == [(7, num_tokens)]


def test_a_journal_that_ckpt_step_leaves_aside_is_named(configured: Callable[..., RunConfig], tmp_path: Path) -> None:
    source = prompts()
    saved(tmp_path, source=source)
    run, line = configured("--ckpt-step", "2"), "is not used, so finished groups start again: ckpt-step is given"
    assert not any(line in each for each in find_start(run, source, SHAPE).changes)
    (tmp_path / "saved" / "journal").mkdir()
    assert find_start(run, source, SHAPE).changes[-1] == f"the journal in {tmp_path / 'saved' / 'journal'} {line}"


@pytest.mark.parametrize("reference", [[], ["--ref-load", str(MODEL)]])
def test_checkpoints_without_the_file_that_names_the_newest_are_mentioned(
    tmp_path: Path, configured: Callable[..., RunConfig], reference: list[str]
) -> None:
    assert find_start(configured(*reference), prompts(), SHAPE).changes == ()
    (saved(tmp_path).parent / "latest_checkpointed_iteration.txt").unlink()
    start = find_start(configured(*reference), prompts(), SHAPE)
    assert (start.step, start.changes) == (
        0,
        (
            f"load {tmp_path / 'saved'} has a checkpoint of step 2, which is not used: "
            "latest_checkpointed_iteration.txt is missing; to resume from it, give ckpt-step 2",
        ),
    )
    assert find_start(configured("--ckpt-step", "2"), prompts(), SHAPE).step == 2
