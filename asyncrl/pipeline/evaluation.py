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

type _Scored = tuple[ScoredSample, str | None]
"""An answer, and its final answer if it has a vote."""


def whole_text(text: str) -> str:
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
    final_answer: Callable[[str], str | None] = whole_text
    """Extracts from a text the final answer by which majority@k counts; None if an answer has no vote."""
    pass_threshold: float | None = None
    """See ``held_out.summary``."""


class Evaluates(Protocol):
    """An evaluation, one pass at a time."""

    async def run(self) -> EvalReport:
        """Run one pass."""


class AnswerPass:
    """The answers of one pass, which hold at most half of the slots.

    An answer's seed depends on the name of its set, its row and its position: it is the same in every pass, and does
    not depend on other sets.
    """

    def __init__(self, slots: Slots, weights: Weights) -> None:
        """Begin a pass; the engines serve ``weights``."""
        self.weights = weights
        self.slots = slots
        self.at_once = asyncio.Semaphore(max(1, slots.limit // 2))
        self.failed: set[str] = set()
        """Names of the sets with a failed answer."""

    async def generate(self, each: HeldOutSet, prompt: Prompt, index: int) -> Sample:
        """Return one answer; the caller has acquired ``at_once``, which is released.

        Raises SampleFailed or EngineRejected.
        """
        name, seed = f"eval-{self.weights.version}-{each.name}-{prompt.row}", f"eval:{each.name}:{prompt.row}"
        self.slots.claim(1)
        try:
            return await each.sampler.generate(name, seed, prompt, each.sampler.partial(index), lambda num_tokens: None)
        finally:
            self.slots.unclaim(1)
            self.at_once.release()


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
        start, this = loop_time(), AnswerPass(self._slots, self._serving.now)
        tasks: dict[str, list[list[asyncio.Task[_Scored | None]]]] = {}
        with plainly():
            async with asyncio.TaskGroup() as answers:
                for each in self._sets:
                    rows = tasks[each.name] = [[] for _ in each.prompts]
                    for row, prompt in zip(rows, each.prompts, strict=True):
                        for index in range(each.samples_per_prompt):
                            await this.at_once.acquire()  # here, so that a pass never has thousands of waiting tasks
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
        scored = await each.sampler.score(prompt, await this.generate(each, prompt, index))
    except (SampleFailed, EngineRejected, RewardFailed) as error:
        level = logging.INFO if each.name in this.failed else logging.WARNING  # a broken set fails thousands of times
        this.failed.add(each.name)
        logger.log(level, "held-out row %d of %s failed and is left out: %s", prompt.row, each.name, error)
        return None
    return scored, each.final_answer(scored.sample.text) if each.samples_per_prompt > 1 else None


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
        num_tokens=sum(len(sample.token_ids) for sample in samples),
        seconds=seconds,
        answers=answers if keeps_answers else {},
    )
