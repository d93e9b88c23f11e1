"""Evaluation by a user's function (``--eval-function-path``).

consumes      held-out prompts, which the function may answer through the run's engines
produces      one EvalReport per pass
waits for     the function, at most ``timeout_s``
unblocked by  the function that returns; its calls that are not over then are cancelled
on cancel     a function written with ``async def`` is cancelled; a thread is left alone
on failure    the pass has no numbers; training continues
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from asyncrl.episodes import Trajectory
from asyncrl.errors import first_line, plainly
from asyncrl.event_loop import Deadline, is_cancelled, loop_time
from asyncrl.held_out.estimates import clustered_mean
from asyncrl.metrics.timeline import Timeline
from asyncrl.pipeline.evaluation import AnswerPass, HeldOutSet, mean_scored
from asyncrl.pipeline.sampling.sampler import ServingWeights
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.protocols import EvalFn
from asyncrl.types import EvalOutcome, EvalReport, EvalSetReport, Prompt, Sample, is_usable

logger = logging.getLogger(__name__)


class EvalPass:
    """See ``protocols.HeldOutPass``."""

    def __init__(self, sets: Sequence[HeldOutSet], slots: Slots, serving: ServingWeights, timeline: Timeline) -> None:
        self.weights = serving.now
        self.prompts: Mapping[str, tuple[Prompt, ...]] = {each.name: each.prompts for each in sets}
        self._sets = {each.name: each for each in sets}
        self._answers = AnswerPass(slots, serving.now, timeline)
        self._episodes: dict[tuple[str, int, int, int], tuple[Trajectory, ...]] = {}
        """The samples of each answer that an episode made."""
        self._calling = set[asyncio.Task[Any]]()
        """The tasks within a call of ``generate`` or ``score``."""
        self._has_left = asyncio.Event()
        self._is_over = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Return the context in which the function runs; its end cancels open episodes, and calls that are not over.

        ``asyncio.gather`` leaves the other calls alone if one of them raises.  They would hold slots for ever more
        passes, or request tokens while the trainer has the GPUs.
        """
        async with self._answers.running():
            try:
                yield
            finally:
                self._is_over = True
                for task in self._calling:
                    task.cancel()
                while self._calling:
                    self._has_left.clear()
                    await self._has_left.wait()

    async def generate(self, name: str, prompt: Prompt, index: int = 0) -> Sample:
        """See ``HeldOutPass.generate``.  An episode with several samples returns the first."""
        with self._call():
            each = self._sets[name]
            await self._answers.admit(each)
            if each.sampler.episodes is None:
                return await self._answers.generate(each, prompt, index)
            made = await self._answers.trajectories(each, prompt, index)
            self._episodes[_key(name, prompt, index)] = made
            return made[0].sample

    async def score(self, name: str, prompt: Prompt, sample: Sample) -> float:
        """See ``HeldOutPass.score``.  The reward of an episode is the mean over its samples."""
        with self._call():
            each, made = self._sets[name], self._episodes.get(_key(name, prompt, sample.index))
            scored = each.sampler.score(prompt, sample) if made is None else mean_scored(each, prompt, made)
            return (await scored).reward

    @contextmanager
    def _call(self) -> Iterator[None]:
        task = asyncio.current_task()
        if self._is_over or task is None:
            raise RuntimeError("the evaluation is over")
        self._calling.add(task)
        try:
            yield
        finally:
            self._calling.discard(task)
            self._has_left.set()


def _key(name: str, prompt: Prompt, index: int) -> tuple[str, int, int, int]:
    return name, prompt.epoch, prompt.row, index


class FunctionEvaluator:
    """Runs a user's function once per pass."""

    def __init__(
        self,
        *,
        function: EvalFn,
        name: str,
        sets: Sequence[HeldOutSet],
        timeout_s: float,
        slots: Slots,
        serving: ServingWeights,
        timeline: Timeline,
    ) -> None:
        """``name`` is that of the function, for log lines."""
        self._function = function
        self._name = name
        self._sets = tuple(sets)
        self._timeout_s = timeout_s
        self._slots = slots
        self._serving = serving
        self._timeline = timeline

    async def run(self) -> EvalReport:
        """Run one pass.  A function that raises, hangs or returns nonsense costs the pass its numbers, not the run."""
        start, weights = loop_time(), self._serving.now
        outcome = await self._outcome(EvalPass(self._sets, self._slots, self._serving, self._timeline))
        self._timeline.span("evaluation", f"version {weights.version}", start, loop_time())
        # The rewards do not name their prompts, so each counts as a prompt (docs/evaluation.md).
        means = {name: clustered_mean([[reward] for reward in each]) for name, each in outcome.rewards.items()}
        sets = {
            name: EvalSetReport(mean=mean, truncated=outcome.truncated.get(name))
            for name, mean in means.items()
            if mean is not None
        }
        return EvalReport(
            weights=weights,
            newest=self._serving.now,
            accuracy={name: report.mean.value for name, report in sets.items()},
            sets=sets,
            metrics=outcome.metrics,
            num_samples=sum(map(len, outcome.rewards.values())),
            num_failed=0,
            num_tokens=0,
            seconds=loop_time() - start,
            columns={
                name: {"rewards": list(each), **outcome.columns.get(name, {})} for name, each in outcome.rewards.items()
            },
        )

    async def _outcome(self, this: EvalPass) -> EvalOutcome:
        deadline = Deadline(self._timeout_s)
        try:
            with plainly():
                async with deadline, this.running():
                    return _checked(await self._function(this))
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            why: BaseException = error
        except Exception as error:  # noqa: BLE001 (a user function may raise anything; it must not end the run)
            why = error
        late = isinstance(why, TimeoutError) and deadline.expired()
        text = f"no result within {self._timeout_s:g} s (eval-timeout-s)" if late else first_line(why)
        logger.warning("the evaluation has no numbers: %s: %s: %s", self._name, type(why).__name__, text, exc_info=why)
        return EvalOutcome(rewards={})


def _checked(returned: Any) -> EvalOutcome:
    """Return the outcome with numbers that can be averaged.  Raises TypeError or ValueError for anything else."""
    if isinstance(returned, EvalOutcome):
        outcome = returned
    elif isinstance(returned, Mapping):
        outcome = EvalOutcome(rewards={str(name): _rewards(name, each) for name, each in returned.items()})
    else:
        raise TypeError(f"must return a dict of lists of rewards by data set name, got a {type(returned).__name__}")
    given = [number for each in outcome.rewards.values() for number in each]
    given += [*outcome.truncated.values(), *outcome.metrics.values()]
    wrong = [number for number in given if not is_usable(number)]
    if wrong:
        raise ValueError(f"must return numbers from -1e15 to 1e15, got {wrong[0]!r:.80}")
    return outcome


def _rewards(name: object, given: Any) -> tuple[float, ...]:
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__iter__"):
        raise TypeError(f"the rewards of {name} must be a list of numbers, got a {type(given).__name__}")
    return tuple(given)
