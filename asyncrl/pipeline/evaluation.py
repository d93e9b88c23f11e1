"""Evaluation: the engines answer held-out prompts while training continues.

consumes      held-out prompts
produces      one EvalReport per pass
waits for     slots; it holds at most half of the slot limit at its start (at least one), so training is not starved
unblocked by  samples that end
on cancel     its requests are aborted on their server
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.errors import EngineRejected, RewardFailed, SampleFailed, plainly
from asyncrl.event_loop import loop_time
from asyncrl.held_out.summary import summary
from asyncrl.metrics.timeline import Timeline
from asyncrl.pipeline.sampling.sampler import Sampler, ServingWeights
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.types import EvalAnswers, EvalReport, EvalSetReport, Prompt, Sample, ScoredSample, Weights

logger = logging.getLogger(__name__)


def whole_text(scored: ScoredSample) -> str:
    """Return the answer's text without surrounding whitespace, as its final answer."""
    return scored.sample.text.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutSet:
    """A set of held-out prompts, and how they are answered and scored."""

    name: str
    prompts: tuple[Prompt, ...]
    samples_per_prompt: int
    sampler: Sampler
    """Holds the set's sampling settings and reward."""
    final_answer: Callable[[ScoredSample], str | None] = whole_text
    """The text by which answers are counted for majority@k; None if an answer has no vote."""
    pass_threshold: float | None = None
    """See ``held_out.summary``."""


class Evaluates(Protocol):
    """An evaluation, one pass at a time."""

    async def run(self) -> EvalReport:
        """Run one pass."""


class Evaluator:
    """Runs passes over the held-out prompts, one at a time."""

    def __init__(
        self, *, sets: Sequence[HeldOutSet], slots: Slots, serving: ServingWeights, timeline: Timeline
    ) -> None:
        self._sets = tuple(sets)
        self._slots = slots
        self._serving = serving
        self._timeline = timeline

    async def run(self) -> EvalReport:
        """Run one pass.  Every pass uses the same random seeds; failed answers are left out and counted.

        An answer's seed depends on the name of its set, its row and its position, not on other sets.
        """
        start, weights = loop_time(), self._serving.now
        at_once = asyncio.Semaphore(max(1, self._slots.limit // 2))
        tasks: dict[str, list[list[asyncio.Task[ScoredSample | None]]]] = {}
        with plainly():
            async with asyncio.TaskGroup() as answers:
                for each in self._sets:
                    rows = tasks[each.name] = [[] for _ in each.prompts]
                    for row, prompt in zip(rows, each.prompts, strict=True):
                        for index in range(each.samples_per_prompt):
                            await at_once.acquire()  # here, so that a pass never has thousands of waiting tasks
                            one = self._one(each, weights, prompt, index, at_once)
                            row.append(answers.create_task(one))
        self._timeline.span("evaluation", f"version {weights.version}", start, loop_time())
        sets = {each.name: _answered(each, tasks[each.name]) for each in self._sets}
        return _report(weights, sets, loop_time() - start)

    async def _one(
        self, each: HeldOutSet, weights: Weights, prompt: Prompt, index: int, at_once: asyncio.Semaphore
    ) -> ScoredSample | None:
        try:
            sample = await self._generate(each, weights, prompt, index, at_once)
            return await each.sampler.score(prompt, sample)
        except (SampleFailed, EngineRejected, RewardFailed) as error:
            logger.warning(
                "held-out row %d of %s failed and is left out of the accuracy: %s", prompt.row, each.name, error
            )
            return None

    async def _generate(
        self, each: HeldOutSet, weights: Weights, prompt: Prompt, index: int, at_once: asyncio.Semaphore
    ) -> Sample:
        name, seed = f"eval-{weights.version}-{each.name}-{prompt.row}", f"eval:{each.name}:{prompt.row}"
        self._slots.claim(1)
        try:
            return await each.sampler.generate(name, seed, prompt, each.sampler.partial(index), lambda num_tokens: None)
        finally:
            self._slots.unclaim(1)
            at_once.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answered:
    report: EvalSetReport | None
    num_failed: int


def _answered(each: HeldOutSet, tasks: Sequence[Sequence[asyncio.Task[ScoredSample | None]]]) -> _Answered:
    answers = [
        EvalAnswers(prompt=prompt, samples=tuple(scored for task in row if (scored := task.result()) is not None))
        for prompt, row in zip(each.prompts, tasks, strict=True)
    ]
    num_failed = sum(map(len, tasks)) - sum(len(one.samples) for one in answers)
    report = summary(
        answers,
        samples_per_prompt=each.samples_per_prompt,
        final_answer=each.final_answer,
        pass_threshold=each.pass_threshold,
        num_failed=num_failed,
    )
    return _Answered(report=report, num_failed=num_failed)


def _report(weights: Weights, sets: Mapping[str, _Answered], seconds: float) -> EvalReport:
    reports = {name: found.report for name, found in sets.items() if found.report is not None}
    samples = [scored.sample for report in reports.values() for one in report.answers for scored in one.samples]
    seen = [span.weights for sample in samples for span in sample.spans]
    return EvalReport(
        weights=weights,
        newest=max(seen, key=lambda known: known.version, default=weights),
        accuracy={name: report.mean.value for name, report in reports.items()},
        sets=reports,
        num_samples=len(samples),
        num_failed=sum(found.num_failed for found in sets.values()),
        num_tokens=sum(len(sample.token_ids) for sample in samples),
        seconds=seconds,
    )
