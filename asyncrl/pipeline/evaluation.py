"""Evaluation: the engines answer held-out prompts while training continues.

consumes      held-out prompts
produces      one EvalReport per pass
waits for     slots; it holds at most half of the slot limit at its start (at least one), so training is not starved
unblocked by  samples that end
on cancel     its requests are aborted on their server
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

from asyncrl.episodes import Trajectory
from asyncrl.errors import EngineRejected, EpisodeEnded, EpisodeFailed, RewardFailed, SampleFailed, plainly
from asyncrl.event_loop import loop_time
from asyncrl.held_out.summary import summary
from asyncrl.metrics.timeline import Timeline
from asyncrl.pipeline.sampling.episodes import Episodes
from asyncrl.pipeline.sampling.sampler import Sampler, ServingWeights
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.task_groups import TaskGroup
from asyncrl.types import EvalAnswers, EvalReport, EvalSetReport, Prompt, Sample, ScoredSample, Weights

logger = logging.getLogger(__name__)

ANSWER_FAILURES = (SampleFailed, EngineRejected, EpisodeFailed, EpisodeEnded, RewardFailed)
"""Errors that leave one answer out."""

type _Scored = tuple[ScoredSample, str | None]
"""An answer, and its final answer if it has a vote."""


def whole_text(prompt: Prompt, text: str) -> str:
    """Return the text of an answer without surrounding whitespace, as its final answer."""
    return text.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutSet:
    """A set of held-out prompts, and how they are answered and scored."""

    name: str
    prompts: tuple[Prompt, ...]
    samples_per_prompt: int
    sampler: Sampler
    """Holds the set's sampling settings and reward."""
    final_answer: Callable[[Prompt, str], str | None] = whole_text
    """Extracts from the text of an answer the final answer by which majority@k counts; None if it has no vote."""
    pass_threshold: float | None = None
    """See ``held_out.summary``."""


class Evaluates(Protocol):
    """An evaluation, one pass at a time."""

    async def run(self) -> EvalReport:
        """Run one pass."""


class AnswerPass:
    """The answers of one pass, which hold at most half of the slots.

    An answer's seed depends on the name of its set, its row and its position: it is the same in every pass, and does
    not depend on other sets.  An episode holds a slot during its turns; at most half of ``max_episodes`` are open.
    """

    def __init__(self, slots: Slots, weights: Weights, timeline: Timeline) -> None:
        """Begin a pass; the engines serve ``weights``."""
        self.weights = weights
        self.slots = slots
        self.failed: set[str] = set()
        """Names of the sets with a failed answer."""
        self._half_of_slots = asyncio.Semaphore(max(1, slots.limit // 2))
        self._half_of_episodes = asyncio.Semaphore(max(1, slots.load.max_open // 2) if slots.load else 1)
        self._episodes = Episodes(slots.load, timeline) if slots.load else None

    def running(self) -> AbstractAsyncContextManager[object]:
        """Return the context in which answers are generated; its end cancels open episodes."""
        return self._episodes or nullcontext()

    async def admit(self, each: HeldOutSet) -> None:
        """Wait until another answer may start.  The caller then calls ``generate`` or ``trajectories`` once."""
        await self._admitting(each).acquire()

    async def answer(self, each: HeldOutSet, prompt: Prompt, index: int) -> ScoredSample:
        """Return one answer with its reward.  If its episode has several samples: the first, with their mean reward.

        Raises one of ANSWER_FAILURES.
        """
        if each.sampler.episodes is None:
            return await each.sampler.score(prompt, await self.generate(each, prompt, index))
        return await mean_scored(each, prompt, await self.trajectories(each, prompt, index))

    async def generate(self, each: HeldOutSet, prompt: Prompt, index: int) -> Sample:
        """Return one answer of a single turn.  Raises SampleFailed or EngineRejected."""
        name, seed = self._name_and_seed(each, prompt)
        self.slots.claim(1)
        try:
            return await each.sampler.generate(name, seed, prompt, each.sampler.partial(index), lambda num_tokens: None)
        finally:
            self.slots.unclaim(1)
            self._admitting(each).release()

    async def trajectories(self, each: HeldOutSet, prompt: Prompt, index: int) -> tuple[Trajectory, ...]:
        """Return the samples of one answer by an episode.  Raises the error of the episode."""
        if self._episodes is None:
            raise AssertionError("the slots have no load of episodes")
        name, seed = self._name_and_seed(each, prompt)
        self.slots.claim(1)
        episode = self._episodes.open(
            each.sampler,
            prompt,
            name=name,
            group_seed=seed,
            index=index,
            group_size=each.samples_per_prompt,
            data_set=each.name,
            hold=self._hold,
        )
        try:
            episode.resume(lambda num_tokens: True)
            outcome = await episode.outcome()
            if not outcome.trajectories:
                raise EpisodeFailed(f"row {prompt.row}: the episode returned no trajectory")
            return tuple(replace(one, sample=replace(one.sample, index=index)) for one in outcome.trajectories)
        finally:
            episode.close()
            self.slots.unclaim(1)
            self._admitting(each).release()

    @asynccontextmanager
    async def _hold(self) -> AsyncIterator[int]:
        async with self._half_of_slots, self.slots.hold() as slot:
            yield slot

    def _admitting(self, each: HeldOutSet) -> asyncio.Semaphore:
        return self._half_of_slots if each.sampler.episodes is None else self._half_of_episodes

    def _name_and_seed(self, each: HeldOutSet, prompt: Prompt) -> tuple[str, str]:
        return f"eval-{self.weights.version}-{each.name}-{prompt.row}", f"eval:{each.name}:{prompt.row}"


async def mean_scored(each: HeldOutSet, prompt: Prompt, trajectories: Sequence[Trajectory]) -> ScoredSample:
    """Return the first of an episode's samples, with the mean reward of all.  Raises RewardFailed."""
    scored = [await each.sampler.score_trajectory(prompt, one) for one in trajectories]
    return replace(scored[0], reward=math.fsum(one.reward for one in scored) / len(scored))


class Evaluator:
    """Runs passes over the held-out prompts, one at a time."""

    def __init__(
        self,
        *,
        sets: Sequence[HeldOutSet],
        slots: Slots,
        serving: ServingWeights,
        timeline: Timeline,
        keeps_answers: bool = False,
    ) -> None:
        """``keeps_answers``: reports have all answers, which take memory."""
        self._sets = tuple(sets)
        self._slots = slots
        self._serving = serving
        self._timeline = timeline
        self._keeps_answers = keeps_answers

    async def run(self) -> EvalReport:
        """Run one pass.  Every pass uses the same random seeds; failed answers are left out and counted."""
        start, this = loop_time(), AnswerPass(self._slots, self._serving.now, self._timeline)
        tasks: dict[str, list[list[asyncio.Task[_Scored | None]]]] = {}
        with plainly():
            async with this.running(), TaskGroup() as answers:
                for each in self._sets:
                    rows = tasks[each.name] = [[] for _ in each.prompts]
                    for row, prompt in zip(rows, each.prompts, strict=True):
                        for index in range(each.samples_per_prompt):
                            await this.admit(each)  # here, so that a pass never has thousands of waiting tasks
                            row.append(answers.create_task(_one(this, each, prompt, index)))
        self._timeline.span("evaluation", f"version {this.weights.version}", start, loop_time())
        sets: dict[str, _Answered] = {}
        for each in self._sets:
            sets[each.name] = _answered(each, tasks[each.name])
            await asyncio.sleep(0)  # 20,000 answers take 75 ms; other tasks run between two sets
        return _report(this.weights, sets, loop_time() - start, keeps_answers=self._keeps_answers)


async def _one(this: AnswerPass, each: HeldOutSet, prompt: Prompt, index: int) -> _Scored | None:
    """Return an answer with its final answer, which is extracted here: all at once would hold the event loop."""
    try:
        scored = await this.answer(each, prompt, index)
    except ANSWER_FAILURES as error:
        level = logging.INFO if each.name in this.failed else logging.WARNING  # a broken set fails thousands of times
        this.failed.add(each.name)
        logger.log(level, "held-out row %d of %s failed and is left out: %s", prompt.row, each.name, error)
        return None
    return scored, each.final_answer(prompt, scored.sample.text) if each.samples_per_prompt > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answered:
    answers: tuple[EvalAnswers, ...]
    report: EvalSetReport | None
    num_failed: int


def _answered(each: HeldOutSet, tasks: Sequence[Sequence[asyncio.Task[_Scored | None]]]) -> _Answered:
    answers = tuple(_answers(prompt, row) for prompt, row in zip(each.prompts, tasks, strict=True))
    num_failed = sum(map(len, tasks)) - sum(len(one.samples) for one in answers)
    report = summary(
        answers,
        samples_per_prompt=each.samples_per_prompt,
        pass_threshold=each.pass_threshold,
        num_failed=num_failed,
    )
    return _Answered(answers=answers, report=report, num_failed=num_failed)


def _answers(prompt: Prompt, tasks: Sequence[asyncio.Task[_Scored | None]]) -> EvalAnswers:
    found = [result for task in tasks if (result := task.result()) is not None]
    return EvalAnswers(
        prompt=prompt, samples=tuple(scored for scored, _ in found), finals=tuple(final for _, final in found)
    )


def _report(weights: Weights, sets: Mapping[str, _Answered], seconds: float, *, keeps_answers: bool) -> EvalReport:
    answers = {
        name: tuple((one.prompt, scored) for one in found.answers for scored in one.samples)
        for name, found in sets.items()
    }
    samples = [scored.sample for each in answers.values() for _, scored in each]
    seen = [span.weights for sample in samples for span in sample.spans]
    reports = {name: found.report for name, found in sets.items() if found.report is not None}
    return EvalReport(
        weights=weights,
        newest=max(seen, key=lambda known: known.version, default=weights),
        accuracy={name: report.mean.value for name, report in reports.items()},
        sets=reports,
        num_samples=len(samples),
        num_failed=sum(found.num_failed for found in sets.values()),
        num_tokens=sum(sample.num_generated for sample in samples),
        seconds=seconds,
        answers=answers if keeps_answers else {},
    )
