"""Whole runs on a user's data source: nothing waits for it on the loop, and resuming loses and repeats no prompt."""

from collections import Counter
from typing import Any

import orjson
import pytest

from asyncrl.compat.data_sources import SlimeSource
from asyncrl.engines.fake import FakeCheckpoints
from asyncrl.errors import HookFailed
from asyncrl.hooks.native_source import NativeSource
from asyncrl.hooks.prompt_source import UserPrompts
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.protocols import UserSource
from asyncrl.types import NewPrompt
from tests.unit.hooks.callers import InlineCaller
from tests.unit.hooks.test_prompt_source import ARGS, Counting, Slimes, tokenise
from tests.unit.pipeline.harness import World


def user_prompts(source: UserSource, seconds: float = 0.0, ahead: int = 4) -> UserPrompts:
    return UserPrompts(source, tokenise, name="mine", ahead=ahead, worker=InlineCaller(seconds), timeout_s=60.0)


def trained(world: World) -> list[str]:
    return [group.prompt.text for batch in world.trainer.batches for group in batch.groups]


def held_out_of(state: RunState) -> list[str]:
    return [prompt.text for prompt in state.prompts]


def test_a_run_trains_on_a_users_prompts_in_order() -> None:
    world = World(steps=3, source=user_prompts(NativeSource(Counting()))).run()
    assert sorted(map(int, trained(world))) == list(range(12))


def test_a_slow_source_slows_generation_and_loses_nothing() -> None:
    fast = World(steps=3, source=user_prompts(NativeSource(Counting()))).run()
    slow = World(steps=3, source=user_prompts(NativeSource(Counting()), seconds=10.0)).run()
    assert slow.seconds > fast.seconds + 15
    assert sorted(trained(slow)) == sorted(trained(fast))


def test_a_source_that_fails_ends_the_run() -> None:
    class Breaks(Counting):
        def take(self) -> NewPrompt:
            if self.taken == 30:
                raise OSError("no server")
            return super().take()

    world = World(steps=9, source=user_prompts(NativeSource(Breaks())))
    with pytest.raises(HookFailed, match=r"^--data-source-path mine: OSError: no server$"):
        world.run()
    assert 0 < len(world.trainer.batches) < 9, "the prompts that it gave before are trained"


def test_a_source_that_ends_ends_the_run() -> None:
    class Ends(Counting):
        def take(self) -> NewPrompt:
            if self.taken == 7:
                raise StopIteration
            return super().take()

    with pytest.raises(HookFailed, match=r"^--data-source-path mine: has no prompts left after 7"):
        World(steps=9, source=user_prompts(NativeSource(Ends()))).run()


@pytest.mark.parametrize("plan", [{}, {"staleness": 3}, {"partial": True}])
def test_a_source_that_ends_with_the_last_group_of_the_run_does_not_end_it_early(plan: dict[str, Any]) -> None:
    class Ends(Counting):
        def take(self) -> NewPrompt:
            if self.taken == 12:
                raise StopIteration
            return super().take()

    world = World(steps=3, source=user_prompts(NativeSource(Ends())), **plan).run()
    assert sorted(map(int, trained(world))) == list(range(12))


@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("plan", [{}, {"stale": "drop"}, {"partial": True}, {"staleness": 3}])
def test_a_resumed_run_finishes_every_prompt_once(at: int, plan: dict[str, Any]) -> None:
    plan = {"steps": 8, "lengths": lambda request: 5 + request.seed % 300, "save_interval": 1, **plan}
    first = World(**plan, source=user_prompts(NativeSource(Counting()), ahead=7), checkpoints=FakeCheckpoints()).run()
    assert first.checkpoints is not None
    state = RunState.from_json(orjson.loads(orjson.dumps(first.checkpoints.written[at])))
    assert state.outstanding == ()
    assert state.source is not None
    done = [group.prompt.text for batch in first.trainer.batches[:at] for group in batch.groups]
    assert sorted(map(int, [*done, *held_out_of(state)])) == list(range(state.source["fetched"]))
    source = user_prompts(NativeSource(Counting()), ahead=7)
    source.restore(state.step, **state.source)
    second = World(**plan, source=source, before=state).run()
    assert max(Counter([*done, *trained(second)]).values()) == 1
    assert set(held_out_of(state)) <= {*trained(second), *(each.prompt.text for each in _left(second))}


def _left(world: World) -> list[Any]:
    return [
        *world.scheduler._in_flight,  # noqa: SLF001
        *world.scheduler._parked,  # noqa: SLF001
        *world.scheduler._buffer.groups().values(),  # noqa: SLF001
        *(_Prompt(prompt) for prompt in world.scheduler._prompt_queue.returned),  # noqa: SLF001
    ]


class _Prompt:
    def __init__(self, prompt: Any) -> None:
        self.prompt = prompt


def test_stale_groups_return_to_a_slime_source_and_start_again() -> None:
    slimes = Slimes()
    plan: dict[str, Any] = {"steps": 8, "stale": "drop", "lengths": lambda request: 5 + request.seed % 400}
    world = World(**plan, source=user_prompts(SlimeSource(slimes, ARGS), ahead=2)).run()
    stale = world.facts[-1].scheduler.groups.stale
    assert stale > 0
    assert len(trained(world)) == len(set(trained(world)))
    assert all(facts.scheduler.returned == 0 for facts in world.facts)


def test_samples_have_numbers_that_never_repeat() -> None:
    world = World(steps=3, source=user_prompts(SlimeSource(Slimes(), ARGS))).run()
    rows = [group.prompt.row for batch in world.trainer.batches for group in batch.groups]
    assert len(rows) == len(set(rows))
