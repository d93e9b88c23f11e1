"""A user's evaluation function in the place of the built-in evaluation, on a virtual clock."""

import asyncio
from typing import Any

import pytest

from asyncrl.compat import SlimeArgs
from asyncrl.compat.log_functions import eval_log_from_slime
from asyncrl.errors import SampleFailed
from asyncrl.protocols import HeldOutPass
from asyncrl.types import EvalOutcome, EvalReport, SamplingParams
from tests.unit.pipeline.harness import World

SAMPLING = SamplingParams(temperature=0.5, top_p=0.9, top_k=-1, max_new_tokens=30)
SETS = {"a": (4, 1, SAMPLING), "b": (40, 1, SAMPLING)}


def run(function: Any, **plan: Any) -> tuple[World, list[EvalReport]]:
    world = World(**{"steps": 3, "eval_interval": 2, "held_out_sets": SETS, "eval_function": function, **plan}).run()
    assert len(world.trainer.batches) == world.steps
    return world, [facts.evaluation for facts in world.facts if facts.evaluation]


def test_the_rewards_of_a_function_are_the_report() -> None:
    async def mine(evaluation: HeldOutPass) -> dict[str, list[float]]:
        return {"mine": [0.0, 1.0, 1.0, 1.0], "other": [evaluation.weights.version], "none": []}

    _, reports = run(mine)
    assert [report.accuracy for report in reports] == [{"mine": 0.75, "other": 0.0}, {"mine": 0.75, "other": 3.0}]
    assert reports[0].sets["mine"].mean.margin == pytest.approx(0.49, abs=0.001)
    assert reports[0].num_samples == 5


def test_a_log_function_of_slimes_shape_sees_the_data_of_the_function() -> None:
    async def mine(evaluation: HeldOutPass) -> EvalOutcome:
        return EvalOutcome(
            rewards={"mine": (0.0, 1.0), "other": (2.0,)},
            columns={"mine": {"rewards": [0.0, 1.0], "truncated": [True, False], "samples": ["a", "b"]}},
        )

    seen: list[Any] = []

    def log(rollout_id: int, args: Any, data: Any, extra_metrics: Any) -> None:
        seen.append(data)

    _, reports = run(mine)
    eval_log_from_slime(log, SlimeArgs())(2, reports[0], {})
    assert seen == [
        {
            "mine": {"rewards": [0.0, 1.0], "truncated": [True, False], "samples": ["a", "b"]},
            "other": {"rewards": [2.0]},
        }
    ]


def test_a_function_generates_and_scores_with_the_settings_of_a_set() -> None:
    seen: dict[str, Any] = {}

    async def mine(evaluation: HeldOutPass) -> dict[str, list[float]]:
        assert list(evaluation.prompts) == ["a", "b"]
        prompt = evaluation.prompts["a"][2]
        seen["samples"] = [await evaluation.generate("a", prompt, index) for index in (0, 1)]
        return {"a": [await evaluation.score("a", prompt, sample) for sample in seen["samples"]]}

    world, reports = run(mine)
    asked = [request for request in world.engine.requests if request.request_id.startswith("eval-0-")]
    assert [request.request_id for request in asked] == ["eval-0-a-2.0", "eval-0-a-2.1"]
    assert {request.sampling for request in asked} == {SAMPLING}
    assert seen["samples"][0].token_ids != seen["samples"][1].token_ids
    assert len(reports) == 2


def test_a_function_holds_at_most_half_of_the_slots() -> None:
    most = 0

    async def mine(evaluation: HeldOutPass) -> dict[str, list[float]]:
        async with asyncio.TaskGroup() as group:
            for prompt in evaluation.prompts["b"]:
                group.create_task(evaluation.generate("b", prompt))
        return {}

    def lengths(request: Any) -> int:
        nonlocal most
        most = max(most, sum(one.request_id.startswith("eval") for one in world.engine.now_busy))
        return 8

    world = World(steps=2, eval_interval=2, held_out_sets=SETS, eval_function=mine, lengths=lengths)
    world.run()
    assert most == 8


async def gathers(evaluation: HeldOutPass) -> Any:
    """Fail in one of many answers; ``gather`` lets the others run."""

    async def one(row: int) -> float:
        prompt = evaluation.prompts["b"][row]
        sample = await evaluation.generate("b", prompt)
        if row == 0:
            raise ValueError("a bug")
        return await evaluation.score("b", prompt, sample)

    return {"b": await asyncio.gather(*map(one, range(40)))}  # noqa: TID251 (as users write it)


@pytest.mark.parametrize("plan", [{}, {"colocate": True, "trains_during_updates": False}])
def test_no_answer_outlives_the_pass_in_which_it_began(plan: dict[str, Any]) -> None:
    def lengths(request: Any) -> int:
        return 1000 if request.request_id.startswith("eval") and "-b-0." not in request.request_id else 8

    world, reports = run(gathers, lengths=lengths, slots=8, train_seconds=0.1, **plan)
    assert [report.num_samples for report in reports] == [0, 0]
    assert world.engine.busy == 0
    assert (world.all_slots.in_use, world.all_slots.free) == (0, 8)
    assert world.seconds < 5.0, "an answer takes ten seconds"


def test_a_call_after_the_end_of_its_pass_is_refused() -> None:
    kept: list[HeldOutPass] = []

    async def mine(evaluation: HeldOutPass) -> Any:
        kept.append(evaluation)
        await kept[0].generate("a", evaluation.prompts["a"][0])
        return {"a": [1.0]}

    _, reports = run(mine)
    assert [report.num_samples for report in reports] == [1, 0]


async def raises(evaluation: HeldOutPass) -> Any:
    raise SampleFailed("no engine")


async def cancels(evaluation: HeldOutPass) -> Any:
    raise asyncio.CancelledError


async def hangs(evaluation: HeldOutPass) -> Any:
    await asyncio.Event().wait()


async def times_out(evaluation: HeldOutPass) -> Any:
    raise TimeoutError("a service")


async def returns_text(evaluation: HeldOutPass) -> Any:
    return {"a": "1.0"}


async def returns_a_list(evaluation: HeldOutPass) -> Any:
    return [1.0]


async def returns_nan(evaluation: HeldOutPass) -> Any:
    return {"a": [float("nan")]}


async def returns_a_wrong_metric(evaluation: HeldOutPass) -> Any:
    return EvalOutcome(rewards={"a": (1.0,)}, metrics={"x": float("inf")})


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (raises, "mine: SampleFailed: no engine"),
        (cancels, "mine: CancelledError: CancelledError"),
        (hangs, "mine: TimeoutError: no result within 20 s (eval-timeout-s)"),
        (times_out, "mine: TimeoutError: a service"),
        (returns_text, "mine: TypeError: the rewards of a must be a list of numbers, got a str"),
        (returns_a_list, "mine: TypeError: must return a dict of lists of rewards by data set name, got a list"),
        (returns_nan, "mine: ValueError: must return numbers from -1e15 to 1e15, got nan"),
        (returns_a_wrong_metric, "mine: ValueError: must return numbers from -1e15 to 1e15, got inf"),
    ],
)
def test_a_function_that_fails_costs_its_pass_its_numbers_and_not_the_run(
    function: Any, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, reports = run(function, eval_timeout_s=20.0)
    assert [(report.accuracy, report.num_failed) for report in reports] == [({}, 0)] * 2
    assert caplog.messages.count(f"the evaluation has no numbers: {line}") == 2
