"""The benchmark of the arrangements: lengths, busy shares, the ideal, confidence intervals, and the report."""

import asyncio
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.metrics.facts import TokenCounts
from asyncrl.metrics.intervals import seconds
from asyncrl.sim.clock import run_virtually
from asyncrl.types import Chunk, FinishReason, Request, SamplingParams, Weights
from benchmarks.sync_vs_async import __main__ as sync_vs_async
from benchmarks.sync_vs_async import options
from benchmarks.sync_vs_async.arrangements import MAX_STALENESS, Arrangement, Length, Seen, arrangement, first_row
from benchmarks.sync_vs_async.figures import ArrangementRun, Results, Setup, StepFigures, ratio_spread, spread, t95
from benchmarks.sync_vs_async.files import read, write
from benchmarks.sync_vs_async.full import progress, rate, stationary
from benchmarks.sync_vs_async.mismatch import mismatch, mismatch_table
from benchmarks.sync_vs_async.report import COLUMNS, markdown, picture, rows
from benchmarks.sync_vs_async.watch import Intervals, WatchedEngine
from benchmarks.sync_vs_async.workload import ForcedLengths, ForcedWorkload, Prompts, made_up_words
from tests.unit.metrics.made import facts

WORKLOAD = ForcedWorkload(vocabulary=512, prompt_tokens=16, median=100, longest=1600, seed=7)
SETUP = Setup(
    model="tiny",
    device="cpu",
    trainer_gpus=1,
    engine_gpus=3,
    slots=10,
    groups=2,
    group_size=2,
    median=8,
    longest=128,
    prompt_tokens=16,
    max_tokens_per_gpu=512,
    parallel={},
)
STEP = StepFigures(
    step_s=2.0, train_s=1.0, trained=100, lag_max=0, lag_tokens=0, pause_s=0.01, update_s=0.02, logprob_diff=None
)
SYNC = ArrangementRun(
    arrangement="sync",
    staleness=0,
    seed=7,
    is_complete=True,
    steps=(STEP, STEP),
    before=TokenCounts(generated=50, trained=50),
    after=TokenCounts(generated=250, trained=250),
    seconds=4.0,
    trainer_busy_s=2.0,
    engines_busy_s=2.0,
    request_s=60.0,
    aborted=0,
)
OURS = replace(
    SYNC,
    arrangement="S=2",
    staleness=2,
    steps=(replace(STEP, step_s=1.0, lag_max=2, lag_tokens=150),) * 2,
    after=TokenCounts(generated=290, trained=250, stale=10, held=30),
    seconds=2.0,
    engines_busy_s=1.6,
)


def request(row: int, index: int, written: int, name: str = "g3.{}") -> Request:
    return Request(
        request_id=name.format(index),
        token_ids=WORKLOAD.prompt(row).token_ids + (5,) * written,
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=1600),
        seed=0,
        weights=Weights(version=0, step=0),
    )


class Asked:
    """An engine that records how many tokens each request asked for."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        self.tokens.append(request.sampling.max_new_tokens)
        await asyncio.sleep(10.0)
        return FinishReason.LENGTH

    async def interrupt(self) -> None: ...

    async def score(self, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        return ()


def test_lengths_have_the_tail_that_was_asked_for() -> None:
    lengths = sorted(WORKLOAD.length(row, index) for row in range(1000) for index in range(8))
    assert statistics.median(lengths) == pytest.approx(100, rel=0.05)
    assert lengths[int(0.95 * len(lengths))] == pytest.approx(800, rel=0.1)
    assert lengths[0] >= 1
    assert lengths[-1] == 1600


def test_a_length_belongs_to_its_prompt_and_place() -> None:
    assert WORKLOAD.length(5, 1) == replace(WORKLOAD, prompt_tokens=20).length(5, 1)
    assert len({WORKLOAD.length(5, 0), WORKLOAD.length(5, 1), WORKLOAD.length(6, 0)}) == 3
    assert WORKLOAD.length(5, 1) != replace(WORKLOAD, seed=8).length(5, 1)


def test_an_engine_is_asked_for_the_tokens_that_are_left() -> None:
    asked = Asked()
    forced = ForcedLengths(asked, WORKLOAD)

    async def ask() -> None:
        await forced.generate(request(700, 1, 0), lambda chunk: None)
        await forced.generate(request(700, 1, 2, "g3~1.{}-2"), lambda chunk: None)

    run_virtually(ask())
    assert asked.tokens == [WORKLOAD.length(700, 1), WORKLOAD.length(700, 1) - 2]


def test_an_answer_whose_last_event_was_lost_is_not_requested_again() -> None:
    asked = Asked()
    whole = request(700, 1, WORKLOAD.length(700, 1))
    reason, _ = run_virtually(ForcedLengths(asked, WORKLOAD).generate(whole, lambda chunk: None))
    assert (reason, asked.tokens) == (FinishReason.LENGTH, [])


def test_prompts_are_of_one_length_and_all_different() -> None:
    prompts = Prompts(WORKLOAD, 510)
    taken = [prompts.take() for _ in range(4)]
    assert [prompt.row for prompt in taken] == [510, 511, 512, 513]
    assert len({prompt.token_ids for prompt in taken}) == 4
    assert {len(prompt.token_ids) for prompt in taken} == {16}
    assert all(0 <= token < 512 for prompt in taken for token in prompt.token_ids)


def test_every_token_of_the_made_up_vocabulary_decodes() -> None:
    words = made_up_words(512)
    assert words.get_vocab_size() == 512
    assert all(words.decode([token]) for token in range(256, 512))


def test_all_arrangements_measure_the_same_prompts() -> None:
    def first_measured(each: Arrangement, groups: int = 4) -> int:
        return first_row(each, groups) + groups * each.round_steps

    assert len({first_measured(arrangement(name)) for name in ("sync", "sync-colocate", "one-step", "S=8")}) == 1


@pytest.mark.parametrize(
    ("name", "steps", "seconds", "num_steps"),
    [("S=2", 4, 1e9, 6), ("S=2", 3, 1e9, 3), ("S=2", 99, 31.0, 6), ("sync", 2, 1e9, 2), ("sync", 0, 0.0, 0)],
)
def test_whole_rounds_are_measured_after_one(name: str, steps: int, seconds: float, num_steps: int) -> None:
    length, seen = Length(steps=steps, seconds=seconds), Seen(round_steps=arrangement(name).round_steps, start_s=0.0)
    while not length.is_over(seen):
        seen.add(facts(len(seen.rows)), 10.0 * (len(seen.rows) + 1), 0)
    assert len(seen.rows) == seen.round_steps + num_steps
    assert seen.start_s == 10.0 * seen.round_steps


def test_arrangements_by_name() -> None:
    assert arrangement("sync") == Arrangement(name="sync", staleness=0)
    assert arrangement("sync-colocate") == Arrangement(name="sync-colocate", staleness=0, colocates=True)
    assert arrangement("one-step") == Arrangement(name="one-step", staleness=1, collects_before_publish=True)
    assert arrangement("S=4") == Arrangement(name="S=4", staleness=4)
    assert arrangement("S=4-no-replay") == Arrangement(name="S=4-no-replay", staleness=4, replays_routes=False)
    for name in ("S=0", "S", "colocate", f"S={MAX_STALENESS + 1}"):
        with pytest.raises(ValueError, match=name):
            arrangement(name)


def test_requests_that_have_not_ended_count_up_to_the_end_of_the_interval() -> None:
    async def watch() -> tuple[Intervals, int]:
        engine = WatchedEngine(Asked())
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(engine.generate(request(1, 0, 0), lambda chunk: None))
            await asyncio.sleep(4.0)
            assert seconds(engine.busy.within(1.0, 3.0)) == 2.0
            first.cancel()
        await engine.generate(request(1, 1, 0), lambda chunk: None)
        return engine.busy, engine.aborted

    (busy, aborted), _ = run_virtually(watch())
    assert busy.within(0.0, 100.0) == [(0.0, 4.0), (4.0, 14.0)]
    assert aborted == 1


def test_full_engines_are_measured_between_chunks() -> None:
    track = [(0.0, 0), (1.0, 1), (11.0, 101)]
    assert progress(track, 6.0) == 51
    assert progress(track, 20.0) == 101
    assert rate([track, [(0.0, 0), (2.0, 1)]], 8, 2.0, 10.0) == pytest.approx(80.0)
    with pytest.raises(ValueError, match="no answer"):
        rate([track], 8, 12.0, 20.0)


def test_slots_begin_in_the_middle_of_long_answers() -> None:
    drawn = stationary(WORKLOAD, 2)
    begun = [next(drawn) for _ in range(2000)]
    assert all(1 <= task.num_tokens <= 1600 for task in begun)
    lengths = [WORKLOAD.length(row, index) for row in range(2000) for index in range(2)]
    left = sum(length**2 for length in lengths) / sum(lengths) / 2  # the mean residual life of renewal theory
    assert statistics.fmean(task.num_tokens for task in begun) == pytest.approx(left, rel=0.1)
    assert statistics.fmean(len(task.prompt) - 16 for task in begun) == pytest.approx(left, rel=0.1)


def test_the_ideal_is_all_useful_gpu_seconds_over_gpus() -> None:
    best = Results(setup=SETUP, runs=(SYNC, OURS)).ideal
    assert (best.trainer_rate, best.engine_rate) == (100.0, 150.0)
    assert best.split == 100.0
    assert best.pooled == pytest.approx(4 / (1 / 100 + 3 / 150))
    assert Results(setup=SETUP, runs=(SYNC, OURS), full_rates=(150.0, 450.0)).ideal.engine_rate == 300.0
    assert Results(setup=SETUP, runs=(SYNC,)).ideal.engine_rate == 100.0  # nothing better to go by


TIME_SHARED = replace(SYNC, arrangement="sync-colocate", num_engines=4, seconds=2.5)
"""A synchronous run in which engines and trainer time-share all four GPUs: 80 tokens/s."""


def test_the_ideal_is_of_gpus_that_do_one_thing() -> None:
    apart = Results(setup=SETUP, runs=(SYNC, OURS)).ideal
    fast = replace(TIME_SHARED, trainer_busy_s=0.1, engines_busy_s=0.1)
    assert Results(setup=SETUP, runs=(SYNC, fast, OURS)).ideal == apart
    alone = Results(setup=SETUP, runs=(TIME_SHARED,)).ideal
    assert (alone.trainer_rate, alone.engine_rate, alone.pooled) == (100.0, 100.0, 50.0)
    one = replace(SETUP, trainer_gpus=1, engine_gpus=0)
    assert Results(setup=one, runs=(replace(TIME_SHARED, num_engines=1),)).ideal.pooled == 50.0


def test_ours_is_compared_with_the_better_synchronous_arrangement() -> None:
    def times(*runs: ArrangementRun) -> dict[str, str]:
        found = [dict(zip(COLUMNS, cells, strict=True)) for cells in rows(Results(setup=SETUP, runs=runs))]
        return {cells["arrangement"]: cells["times sync"] for cells in found}

    step = replace(STEP, step_s=1.25)
    better, worse = (
        replace(TIME_SHARED, steps=(step, step)),
        replace(TIME_SHARED, steps=(replace(STEP, step_s=4.0),) * 2),
    )
    assert times(SYNC, OURS, better) == {"sync": "0.62", "S=2": "1.25", "sync-colocate": "1.00"}
    assert times(SYNC, OURS, worse) == {"sync": "1.00", "S=2": "2.00", "sync-colocate": "0.50"}
    assert times(OURS, better) == {"S=2": "1.25", "sync-colocate": "1.00"}


def test_all_gpus_are_counted_where_all_generate() -> None:
    found = Results(setup=SETUP, runs=(SYNC, TIME_SHARED))
    assert found.figures["sync-colocate"].slots_filled == pytest.approx(60 / 2.5 / 40)
    cells = {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in rows(found)}
    assert cells["sync-colocate"]["of the split's ideal"] == ""
    assert cells["sync"]["of the split's ideal"] != ""


def test_on_shared_gpus_all_train_and_all_generate() -> None:
    words = ["--trainer-gpus", "1", "--engine-gpus", "2", "--device", "cpu", "--model", "tiny"]
    asked = options.parse(words, "")
    shared = options.deployment(asked, Path("model"), Path("logs"), 60.0, colocates=True).layout
    assert (shared.num_ranks, shared.num_engines, shared.gpus_per_engine, shared.is_shared) == (3, 3, 1, True)
    apart = options.deployment(asked, Path("model"), Path("logs"), 60.0, colocates=False).layout
    assert (apart.num_ranks, apart.num_engines, apart.is_shared) == (1, 2, False)


def test_figures_add_up() -> None:
    found = Results(setup=SETUP, runs=(SYNC, OURS, OURS)).figures
    assert found["sync"].rate.mean == 50.0
    assert found["S=2"].rate.mean == 100.0
    assert found["S=2"].num_steps == 4
    assert (found["sync"].trainer_idle, found["sync"].engines_idle) == (0.5, 0.5)
    assert found["sync"].slots_filled == pytest.approx(60 / 4 / 30)
    assert (found["S=2"].lag_mean, found["S=2"].lag_max) == (1.5, 2)
    tokens = found["S=2"].tokens
    assert tokens.generated == tokens.trained + tokens.stale + tokens.held == 480


def test_intervals_of_confidence() -> None:
    assert spread([1.0, 2.0, 3.0]).half == pytest.approx(4.303 / 3**0.5)
    assert spread([1.0]).half == float("inf")
    assert ratio_spread([100, 300], [1.0, 3.0]).half == 0.0  # long steps with more tokens are no noise
    uneven = ratio_spread([100, 300], [1.0, 1.0])
    assert uneven.mean == 200.0
    assert uneven.half == pytest.approx(12.706 * 100.0)
    assert t95(30) == 2.042
    assert t95(31) == pytest.approx(2.040, abs=0.004)


def test_results_survive_their_file(tmp_path: Path) -> None:
    results = Results(setup=SETUP, runs=(SYNC, OURS), full_rates=(200.0,))
    about = {"hardware": "a CPU", "date": "today", "command": "this", "commit": None}
    write(tmp_path / "a", results, about)
    write(tmp_path / "b", replace(results, runs=(OURS,)), about | {"date": "tomorrow"})
    joined, joined_about = read([tmp_path / "a" / "results.json", tmp_path / "b" / "results.json"])
    assert joined == replace(results, runs=(SYNC, OURS, OURS), full_rates=(200.0, 200.0))
    assert joined_about["date"] == "today; tomorrow"
    assert joined_about["command"] == "this"


def test_other_setups_are_not_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = {"hardware": "a CPU", "date": "today", "command": "this", "commit": None}
    write(tmp_path / "a", Results(setup=SETUP, runs=(SYNC,)), about)
    write(tmp_path / "b", Results(setup=replace(SETUP, groups=3), runs=(SYNC,)), about)
    files = [str(tmp_path / name / "results.json") for name in "ab"]
    assert sync_vs_async.main(["--show", *files, "--out", str(tmp_path / "c")]) == 2
    assert "setup or hardware differs" in capsys.readouterr().out.replace("\n", "")
    assert sync_vs_async.main(["--show", files[0], "--out", str(tmp_path / "c")]) == 0
    assert "sync" in capsys.readouterr().out


def test_the_report_shows_every_figure() -> None:
    half = replace(OURS, is_complete=False, aborted=3)
    results = Results(setup=SETUP, runs=(SYNC, half))
    first, second = (dict(zip(COLUMNS, cells, strict=True)) for cells in rows(results))
    assert (first["arrangement"], second["arrangement"]) == ("sync", "S=2 *")
    assert (first["times sync"], second["times sync"], second["times one-step"]) == ("1.00", "2.00", "")
    assert second["of the split's ideal"] == "1.00"
    assert (second["lag mean/max"], second["pause ms median/max"]) == ("1.50/2", "10/10")
    assert (second["thrown away"], second["aborted"]) == ("10", "3")
    assert second["held"] == "30 !"  # more than a tenth of the trained tokens
    assert "| sync |" in markdown(results, {"commit": "abc"})
    assert "4 / (1 / 100 + 3 / 150)" in markdown(results, {})
    assert ">2.00<" in picture(results)


def test_the_mismatch_is_that_of_the_measured_steps() -> None:
    def row(mean: float, largest: float) -> dict[str, float]:
        return {"mismatch/logprob_mean": mean, "mismatch/logprob_max": largest}

    steps = (replace(STEP, trained=100), replace(STEP, trained=300))
    run = replace(SYNC, steps=steps, rows=(row(9.0, 9.0), row(0.1, 0.5), row(0.3, 0.4)))
    assert mismatch([run]) == pytest.approx({"mismatch/logprob_mean": 0.25, "mismatch/logprob_max": 0.5})
    assert "| sync | 2.50e-01 |  | 5.00e-01 |" in markdown(Results(setup=SETUP, runs=(run,)), {})
    assert mismatch_table(Results(setup=SETUP, runs=(SYNC,))) == []


@pytest.mark.parametrize(("model", "is_mixture"), [("tiny-moe", True), ("tiny", False)])
def test_engines_of_a_mixture_tell_their_routes(model: str, is_mixture: bool) -> None:
    asked = options.parse(["--device", "cpu", "--model", model], "")
    assert options.setup(asked).is_mixture is is_mixture
    routes = options.deployment(asked, Path("model"), Path("logs"), 60.0, colocates=False).routes
    assert (routes and routes.num_chosen) == (2 if is_mixture else None)
    alone = options.parse(["--device", "cpu", "--model", model, "--arrangements", "S=2-no-replay"], "")
    assert options.deployment(alone, Path("model"), Path("logs"), 60.0, colocates=False).routes is None


def test_nothing_measured_is_shown_as_such() -> None:
    nothing = Results(setup=SETUP, runs=(replace(SYNC, steps=()),))
    assert rows(nothing) == []
    assert "No measured step" in markdown(nothing, {})
    assert "no measured step" in picture(nothing)


def test_server_flags_of_ours_give_way() -> None:
    asked = options.parse(["--sglang", "attention-backend=fa3", "--sglang", "grammar-backend=false"], "")
    flags = options.server_flags(asked)
    assert (flags["attention-backend"], flags["grammar-backend"]) == ("fa3", False)
    assert flags["disable-prefill-cuda-graph"] is True
    assert options.server_flags(options.parse(["--device", "cpu", "--sglang", "bare"], "")) == {"bare": True}


def test_a_model_that_does_not_fit_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    fits = ["--model", "moe-6b", "--trainer-gpus", "2", "--expert-model-parallel-size", "2"]
    only = ["--arrangements", "sync", "S=2"]
    options.parse([*fits, *only], "")
    alone = ["--model", "moe-6b", *only]
    options.parse(alone, "")
    for words in ([*fits, *only, "--max-tokens-per-gpu", "131072"], [*alone, "--max-tokens-per-gpu", "32768"]):
        with pytest.raises(SystemExit):
            options.parse(words, "")
        assert "a trainer rank needs" in capsys.readouterr().err
    options.parse(["--model", "moe-6b", "--device", "cpu"], "")


def test_impossible_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    odd = ["--tensor-model-parallel-size", "2", "--trainer-gpus", "2", "--arrangements", "sync-colocate"]
    none = ["--engine-gpus", "0", "--arrangements", "sync"]
    assert [each.name for each in options.parse(none[:2], "").arrangements] == ["sync-colocate"]
    for words in (odd, none, ["--tensor-model-parallel-size", "2"], ["--arrangements", "S=0"], ["--groups", "0"]):
        with pytest.raises(SystemExit):
            options.parse(words, "")
        assert words[0].removeprefix("--").split("-")[0] in capsys.readouterr().err
    asked = options.parse(["--longest", "128", "--trainer-gpus", "2", "--tensor-model-parallel-size", "2"], "")
    assert asked.median == 8
    assert [each.name for each in asked.arrangements] == ["sync", "one-step", "S=1", "S=2", "S=4"]  # not on 3 GPUs
    assert options.setup(asked).parallel == {"tensor_model_parallel_size": 2}
    assert json.dumps(options.setup(asked).parallel)
