"""The prompts of a user's data source: fetched ahead, given back, and restored without a loss."""

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.compat import Sample, SlimeArgs
from asyncrl.compat.data_sources import SlimeSource
from asyncrl.errors import HookFailed
from asyncrl.hooks.native_source import NativeSource
from asyncrl.hooks.prompt_source import UserPrompts
from asyncrl.hooks.worker import Worker
from asyncrl.protocols import UserSource
from asyncrl.types import NewPrompt, Prompt
from tests.unit.hooks.callers import InlineCaller
from tests.unit.scored_groups import group
from tests.virtual_time import run_virtually

ARGS = SlimeArgs(n_samples_per_prompt=2)


def tokenise(new: NewPrompt, row: int) -> Prompt | None:
    text = str(new.prompt)
    made = Prompt(
        row=row, epoch=0, text=text, token_ids=new.token_ids or (1,), label=new.label, metadata=dict(new.metadata)
    )
    return None if text == "too long" else made


def prompts(source: UserSource, ahead: int = 4, caller: Any = None) -> UserPrompts:
    return UserPrompts(source, tokenise, name="mine", ahead=ahead, worker=caller or InlineCaller(), timeout_s=60.0)


async def taken(source: UserPrompts, count: int) -> list[Prompt]:
    found = []
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(source.run())
        for _ in range(count):
            await source.ready()
            found.append(source.take())
            await asyncio.sleep(0)
        running.cancel()
    return found


def texts(found: list[Prompt]) -> list[str]:
    return [prompt.text for prompt in found]


class Counting:
    """A native source of numbered prompts that can be resumed."""

    def __init__(self) -> None:
        self.taken = 0
        self.seen: list[int] = []

    def take(self) -> NewPrompt:
        self.taken += 1
        return NewPrompt(prompt=str(self.taken - 1), label=self.taken, metadata={"a": 1})

    def finished(self, scored: Any) -> None:
        self.seen.append(scored.group_id)

    def state(self) -> Any:
        return self.taken

    def load(self, state: Any) -> None:
        self.taken = state


class Slimes:
    """A source of slime's shape with a buffer."""

    def __init__(self, takes_back: bool = True) -> None:
        self.calls: list[Any] = []
        self.buffer: list[list[Sample]] = []
        self.number = 0
        self.takes_back = takes_back

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        self.calls.append(num_samples)
        given, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
        while len(given) < num_samples:
            sample = Sample(prompt=str(self.number), label="l", metadata={"n": self.number})
            sample.secret = object()  # type: ignore[attr-defined]
            given.append([copy.copy(sample), copy.copy(sample)])
            self.number += 1
        return given

    def add_samples(self, samples: list[list[Sample]]) -> None:
        if not self.takes_back:
            raise RuntimeError("read-only")
        self.buffer += samples

    def save(self, rollout_id: int) -> None:
        self.calls.append(("save", rollout_id))

    def load(self, rollout_id: int) -> None:
        self.calls.append(("load", rollout_id))


def test_prompts_come_in_order_with_rows_over_the_run() -> None:
    found, _ = run_virtually(taken(prompts(NativeSource(Counting())), 10))
    assert texts(found) == [str(number) for number in range(10)]
    assert [prompt.row for prompt in found] == list(range(10))
    assert str(found[3].label) == "4"
    assert found[3].metadata == {"a": 1}


def test_at_most_so_many_prompts_are_fetched_ahead() -> None:
    source = Counting()
    run_virtually(taken(prompts(NativeSource(source), ahead=6), 1))
    assert source.taken <= 7
    slimes = Slimes()
    run_virtually(taken(prompts(SlimeSource(slimes, ARGS), ahead=6), 6))
    assert slimes.calls[0] == 6
    assert all(asked <= 6 for asked in slimes.calls)


def test_a_slow_source_is_waited_for() -> None:
    source = prompts(NativeSource(Counting()), ahead=2, caller=InlineCaller(seconds=5.0))
    _, seconds = run_virtually(taken(source, 4))
    assert seconds == pytest.approx(20.0)  # one call per prompt
    slimes = prompts(SlimeSource(Slimes(), ARGS), ahead=2, caller=InlineCaller(seconds=5.0))
    _, seconds = run_virtually(taken(slimes, 4))
    assert seconds == pytest.approx(12.5, abs=2.6)  # two or three calls of two prompts


def test_a_native_source_has_the_time_limit_for_each_prompt_and_its_first_is_used_at_once() -> None:
    caller = InlineCaller(seconds=5.0)
    _, seconds = run_virtually(taken(prompts(NativeSource(Counting()), ahead=64, caller=caller), 1))
    assert seconds == pytest.approx(5.0)
    counting = Counting()
    source = prompts(NativeSource(counting), ahead=8, caller=InlineCaller(seconds=5.0))

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(source.run())
            await asyncio.sleep(100.0)
            assert counting.taken == 8
            for _ in range(3):
                source.take()
            await asyncio.sleep(100.0)
            assert counting.taken == 8  # more than half of them wait
            source.take()
            await asyncio.sleep(100.0)
            assert counting.taken == 12
            running.cancel()

    run_virtually(main())


def test_iterators_of_all_kinds() -> None:
    def plain() -> Iterator[NewPrompt]:
        for number in range(9):
            yield NewPrompt(prompt=str(number))

    async def waits() -> AsyncIterator[NewPrompt]:
        for number in range(9):
            await asyncio.sleep(0)
            yield NewPrompt(prompt=str(number))

    class Awaits:
        number = 0

        async def take(self) -> NewPrompt:
            await asyncio.sleep(0)
            self.number += 1
            return NewPrompt(prompt=str(self.number - 1))

    for source in (plain(), waits(), Awaits(), [NewPrompt(prompt=str(number)) for number in range(9)]):
        found = asyncio.run(taken(prompts(NativeSource(source), caller=Worker("test")), 5))
        assert texts(found) == ["0", "1", "2", "3", "4"]


def refused(source: UserSource) -> str:
    with pytest.raises(ExceptionGroup) as errors:
        run_virtually(taken(prompts(source), 20))
    assert isinstance(errors.value.exceptions[0], HookFailed)
    return str(errors.value.exceptions[0])


def given(groups: Any) -> UserSource:
    class Gives:
        def get_samples(self, num_samples: int) -> Any:
            return groups

    return SlimeSource(Gives(), ARGS)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (NativeSource(iter([NewPrompt(prompt="a")])), "has no prompts left after 1; a source must be endless"),
        (NativeSource(iter(["a"])), "must give asyncrl.types.NewPrompt, got a str"),
        (given([]), "has no prompts left after 0; a source must be endless"),
        (given(None), "get_samples must return a list of groups, got a NoneType"),
        (given(["ab"]), "get_samples must return groups of asyncrl.compat.Sample, got a str"),
        (given([[]]), "get_samples must return groups of asyncrl.compat.Sample, got an empty group"),
        (given([[Sample(prompt="a")] * 3]),
         "get_samples returned a group of 3 samples; --n-samples-per-prompt is 2"),
        (given([[Sample(prompt="a"), Sample(prompt="b")]]),
         "get_samples returned a group of different prompts; a group has one prompt"),
        (given([[Sample(prompt="a", metadata=[1])] * 2]), "a sample's metadata must be a dict, got a list"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_wrong_prompts_are_named(source: UserSource, line: str) -> None:
    said = refused(source)
    assert said.startswith("--data-source-path mine: ")
    assert line in said


class Ends(Slimes):
    """Has two prompts, and the groups that come back."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        left = len(self.buffer) + 2 - self.number
        return super().get_samples(min(num_samples, left))


def test_a_group_that_comes_back_while_the_source_is_asked_is_waited_for() -> None:
    async def main() -> None:
        source = prompts(SlimeSource(Ends(), ARGS), caller=InlineCaller(seconds=5.0))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(source.run())
            for _ in range(2):
                await source.ready()
                last = source.take()
            tasks.create_task(source.ready())  # fails if the source is taken to have ended
            await asyncio.sleep(2.0)  # the source is asked for further prompts, and has none
            source.returned(last, None, "stale")
            await source.ready()
            assert source.take().text == "1"
            running.cancel()

    run_virtually(main())


def test_a_source_that_had_no_prompt_is_asked_again_after_a_group_that_comes_back() -> None:
    async def main() -> None:
        source = prompts(SlimeSource(Ends(), ARGS))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(source.run())
            for _ in range(2):
                await source.ready()
                last = source.take()
            with pytest.raises(HookFailed, match="has no prompts left after 2"):
                await source.ready()
            source.returned(last, None, "stale")
            await source.ready()
            assert source.take().text == "1"
            running.cancel()

    run_virtually(main())


def test_one_sample_or_a_flat_list_stands_for_a_group() -> None:
    found, _ = run_virtually(taken(prompts(given([Sample(prompt="a"), [Sample(prompt="b", tokens=[5, 6])]])), 2))
    assert [(prompt.text, prompt.token_ids) for prompt in found] == [("a", (1,)), ("b", (5, 6))]


def test_too_long_prompts_are_left_out() -> None:
    source = NativeSource(iter([NewPrompt(prompt=text) for text in ("too long", "a", "too long", "b") * 9]))
    found, _ = run_virtually(taken(prompts(source), 2))
    assert [(prompt.text, prompt.row) for prompt in found] == [("a", 1), ("b", 3)]


def test_finished_groups_are_shown_to_a_native_source() -> None:
    counting = Counting()

    async def main() -> None:
        source = prompts(NativeSource(counting))
        source.finished(group(3, (0.0, 1.0)), None)
        source.finished(group(4, (0.0, 0.0)), "dull")
        await taken(source, 1)
        assert not source.returned((await taken(source, 1))[0], None, "stale")

    run_virtually(main())
    assert counting.seen == [3, 4]


def test_returned_groups_go_to_add_samples_as_the_users_objects() -> None:
    slimes = Slimes()

    async def main() -> list[Prompt]:
        source = prompts(SlimeSource(slimes, ARGS), ahead=2)
        first, second = await taken(source, 2)
        assert source.returned(first, None, "stale")
        assert source.returned(second, group(second.row, (0.0, 1.0)), "failed")
        return await taken(source, 4)

    found, _ = run_virtually(main())
    assert "0" in texts(found)
    assert "1" in texts(found)
    assert len(set(texts(found))) == 4
    assert not slimes.buffer


def test_the_samples_that_come_back_are_aborted_and_keep_their_attributes() -> None:
    slimes = Slimes()

    async def main() -> None:
        source = prompts(SlimeSource(slimes, ARGS), ahead=2)
        first, second = await taken(source, 2)
        source.returned(second, group(second.row, (0.0, 1.0)), "stale")
        source.returned(first, None, "failed")
        slimes.number = 10
        async with source.saved(3):
            pass

    run_virtually(main())
    assert [[sample.status.value for sample in samples] for samples in slimes.buffer] == [["aborted"] * 2] * 2
    assert [[sample.reward for sample in samples] for samples in slimes.buffer] == [[0.0, 1.0], [None, None]]
    assert all(hasattr(sample, "secret") for samples in slimes.buffer for sample in samples)
    assert ("save", 2) in slimes.calls


def test_rewards_of_episodes_with_several_samples_go_to_their_sample() -> None:
    slimes = Slimes()

    async def main() -> None:
        source = prompts(SlimeSource(slimes, ARGS), ahead=1)
        (first,) = await taken(source, 1)
        both = group(first.row, (0.25, 0.5, 1.0))
        episodes = [
            replace(scored, sample=replace(scored.sample, rollout_index=rollout))
            for scored, rollout in zip(both.samples, (0, 0, 1), strict=True)
        ]
        source.returned(first, replace(both, samples=tuple(episodes)), "stale")
        async with source.saved(3):
            pass

    run_virtually(main())
    assert [sample.reward for sample in slimes.buffer[0]] == [0.25, 1.0]


def test_a_prompt_of_a_former_life_comes_back_with_its_tokens() -> None:
    slimes = Slimes()
    source = SlimeSource(slimes, ARGS)
    assert source.give_back(Prompt(row=0, epoch=0, text="", token_ids=(7, 8), label=None), None, None)
    assert [sample.tokens for sample in slimes.buffer[0]] == [[7, 8], [7, 8]]


def test_a_read_only_source_lets_stale_prompts_start_again() -> None:
    async def main() -> list[Prompt]:
        source = prompts(SlimeSource(Slimes(takes_back=False), ARGS), ahead=2)
        first, second = await taken(source, 2)
        assert source.returned(first, None, "stale")
        assert source.returned(second, None, "failed")
        async with source.saved(1):
            pass
        assert not source.returned(second, None, "stale")  # from now on, they return to the queue
        return await taken(source, 3)

    found, _ = run_virtually(main())
    assert texts(found)[0] == "0"
    assert "1" not in texts(found)


def test_a_state_has_the_prompts_fetched_ahead_and_no_others() -> None:
    async def main() -> None:
        source = prompts(NativeSource(counting := Counting()), ahead=5)
        done = await taken(source, 3)
        async with source.saved(2) as state:
            assert state.state == state.fetched == counting.taken
            assert [prompt.row for prompt in state.ahead] == list(range(len(done), state.fetched))
        again = prompts(NativeSource(counting := Counting()), ahead=5)
        again.restore(2, state.fetched, state.state)
        assert [prompt.row for prompt in await taken(again, 2)] == [state.fetched, state.fetched + 1]
        assert counting.taken > state.fetched

    run_virtually(main())


def test_a_state_is_a_copy_that_later_calls_do_not_change() -> None:
    class Replays(Counting):
        """Returns the very list from which it takes its prompts."""

        def __init__(self) -> None:
            super().__init__()
            self.hard = [str(number) for number in range(9)]

        def take(self) -> NewPrompt:
            return NewPrompt(prompt=self.hard.pop(0))

        def state(self) -> Any:
            return self.hard

    async def main() -> None:
        source = prompts(NativeSource(Replays()), ahead=2)
        await taken(source, 1)
        async with source.saved(1) as state:
            known = copy.deepcopy(state.state)
        assert [prompt.text for prompt in state.ahead] + known == [str(number) for number in range(1, 9)]
        await taken(source, 3)
        assert state.state == known

    run_virtually(main())


def test_a_state_that_is_not_json_is_named() -> None:
    class Sets(Counting):
        def state(self) -> Any:
            return {1, 2}

    async def main() -> None:
        async with prompts(NativeSource(Sets())).saved(1):
            pass

    with pytest.raises(HookFailed, match=r"mine: .*state\(\) must return JSON values, .* got a set"):
        run_virtually(main())


def test_only_a_source_of_slimes_shape_has_get_samples() -> None:
    assert prompts(NativeSource(Counting())).get_samples is None
    get_samples = prompts(SlimeSource(Slimes(), ARGS)).get_samples
    assert get_samples is not None
    assert [sample.prompt for (sample, _) in get_samples(2)] == ["0", "1"]


def test_slimes_source_loads_the_last_step() -> None:
    slimes = Slimes()
    prompts(SlimeSource(slimes, ARGS)).restore(7, 3, None)
    assert slimes.calls == [("load", 6)]


def test_a_state_without_load_is_refused() -> None:
    class Forgets:
        def take(self) -> NewPrompt:
            return NewPrompt(prompt="a")

    with pytest.raises(HookFailed, match=r"has state\(\) but no load\(state\)"):
        prompts(NativeSource(Forgets())).restore(1, 1, {"a": 1})
    prompts(NativeSource(Forgets())).restore(1, 1, None)


def test_prompts_are_stored_whole() -> None:
    source = prompts(NativeSource(Counting()))
    assert (len(source), source.fingerprint) == (0, "--data-source-path mine")
    with pytest.raises(KeyError):
        source.at(0, 1)


def test_a_state_waits_for_a_fetch_in_progress_and_holds_the_next() -> None:
    class Late(InlineCaller):
        """Runs a call at once and hands its result over later, so that a fetch is under way when a state is asked."""

        async def call[T](self, function: Any, name: str, timeout_s: float) -> Any:
            result = self.call_now(function, name, timeout_s)
            await asyncio.sleep(5.0)
            return result

    async def main() -> None:
        counting = Counting()
        source = prompts(NativeSource(counting), ahead=4, caller=Late())
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(source.run())
            await asyncio.sleep(1.0)  # the first fetch is under way
            async with source.saved(1) as state:
                assert state.state == state.fetched == len(state.ahead) == counting.taken == 1
                for _ in state.ahead:
                    source.take()
                await asyncio.sleep(60.0)
                assert counting.taken == 1
            await source.ready()
            assert source.take().text == "1"
            running.cancel()

    run_virtually(main())
