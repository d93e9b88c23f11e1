"""Evaluation: the engines answer held-out prompts while training continues.

consumes      held-out prompts
produces      one EvalReport per pass
waits for     slots; it holds at most half of the slot limit at its start (at least one), so training is not starved
unblocked by  samples that end
on cancel     its requests are aborted on their server
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from asyncrl.errors import EngineRejected, RewardFailed, SampleFailed, plainly
from asyncrl.event_loop import loop_time
from asyncrl.metrics.timeline import Timeline
from asyncrl.pipeline.sampling.sampler import Sampler, ServingWeights
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.types import EvalReport, Prompt, Sample, ScoredSample, Weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The prompts of an evaluation."""

    prompts: Mapping[str, tuple[Prompt, ...]]
    """Prompts by data set name."""
    samples_per_prompt: int


class Evaluator:
    """Runs passes over the held-out prompts, one at a time."""

    def __init__(
        self,
        *,
        held_out: HeldOut,
        sampler: Sampler,
        slots: Slots,
        serving: ServingWeights,
        timeline: Timeline,
        keeps_answers: bool = False,
    ) -> None:
        """``keeps_answers``: reports have all answers, which take memory."""
        self._held_out = held_out
        self._sampler = sampler
        self._slots = slots
        self._serving = serving
        self._timeline = timeline
        self._keeps_answers = keeps_answers
        self._at_once = asyncio.Semaphore(1)

    async def run(self) -> EvalReport:
        """Run one pass.  Every pass uses the same random seeds; failed answers are left out and counted."""
        start, weights = loop_time(), self._serving.now
        self._at_once = asyncio.Semaphore(max(1, self._slots.limit // 2))
        with plainly():
            async with asyncio.TaskGroup() as answers:
                tasks = {
                    name: [
                        answers.create_task(self._one(f"eval-{weights.version}-{name}-{row}", row, index, prompt))
                        for row, prompt in enumerate(prompts)
                        for index in range(self._held_out.samples_per_prompt)
                    ]
                    for name, prompts in self._held_out.prompts.items()
                }
        self._timeline.span("evaluation", f"version {weights.version}", start, loop_time())
        return self._report(
            weights, {name: [task.result() for task in answered] for name, answered in tasks.items()}, start
        )

    def _report(self, weights: Weights, answers: Mapping[str, list[ScoredSample | None]], start: float) -> EvalReport:
        scored = {name: [answer for answer in answered if answer] for name, answered in answers.items()}
        samples = [answer.sample for answered in scored.values() for answer in answered]
        seen = [span.weights for sample in samples for span in sample.spans]
        return EvalReport(
            weights=weights,
            newest=max(seen, key=lambda known: known.version, default=weights),
            accuracy={
                name: fmean(answer.reward for answer in answered) for name, answered in scored.items() if answered
            },
            num_samples=len(samples),
            num_failed=sum(len(answered) for answered in answers.values()) - len(samples),
            num_tokens=sum(len(sample.token_ids) for sample in samples),
            seconds=loop_time() - start,
            answers=self._answers(answers) if self._keeps_answers else {},
        )

    def _answers(
        self, answers: Mapping[str, list[ScoredSample | None]]
    ) -> dict[str, tuple[tuple[Prompt, ScoredSample], ...]]:
        """Return each answer with its prompt, in the order of the prompts."""
        size = self._held_out.samples_per_prompt
        return {
            name: tuple(
                (self._held_out.prompts[name][place // size], answer)
                for place, answer in enumerate(answered)
                if answer is not None
            )
            for name, answered in answers.items()
        }

    async def _one(self, name: str, row: int, index: int, prompt: Prompt) -> ScoredSample | None:
        try:
            sample = await self._generate(name, row, index, prompt)
            return await self._sampler.score(prompt, sample)
        except (SampleFailed, EngineRejected, RewardFailed) as error:
            logger.warning("held-out row %d failed and is left out of the accuracy: %s", row, error)
            return None

    async def _generate(self, name: str, row: int, index: int, prompt: Prompt) -> Sample:
        async with self._at_once:
            self._slots.claim(1)
            try:
                partial = self._sampler.partial(index)
                return await self._sampler.generate(name, -1 - row, prompt, partial, lambda num_tokens: None)
            finally:
                self._slots.unclaim(1)
