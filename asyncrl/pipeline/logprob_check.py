"""Whether engines and trainer agree: log-probs of the same tokens, under the same weights, from both."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import sub

from asyncrl.errors import EngineError, plainly
from asyncrl.protocols import RolloutEngine
from asyncrl.types import Batch, ScoredSample, Weights

logger = logging.getLogger(__name__)

PROBED_SAMPLES = 4
"""Answers scored again by the engines at a step that trains on none of their present weights' tokens: enough for a mean
over some hundred tokens, too few to be noticed."""
COMPARED_TOKENS = 65_536
"""Compared at a step that trains on more: a mean needs no more, and the event loop does nothing else for 4 ms."""


async def engine_logprobs(batch: Batch, served: Weights, engine: RolloutEngine | None) -> dict[int, Sequence[float]]:
    """By place in the batch: log-probs of answers under ``served``, as the engines see them.

    Answers written by these very weights bring them along; failing those, ``engine`` scores some answers anew, if there
    is one to ask.  The caller cancels that when it takes too long: the engines serve it in its turn.
    """
    answers = dict(enumerate(_answers(batch)))
    fresh = written_by(served, answers)
    if fresh or engine is None:
        return fresh
    size = len(batch.groups[0].samples)
    chosen = list(answers)[::size][:PROBED_SAMPLES]
    prompts = {place: batch.groups[place // size].prompt.token_ids for place in chosen}
    probes = {place: (*prompts[place], *answers[place].sample.token_ids) for place in chosen}
    try:
        with plainly():
            async with asyncio.TaskGroup() as scoring:
                tasks = {
                    place: scoring.create_task(engine.score(token_ids, len(prompts[place])))
                    for place, token_ids in probes.items()
                }
    except EngineError as error:
        logger.warning("step %d: no log-probs to compare with: %s", batch.step, error)
        return {}
    return {place: task.result() for place, task in tasks.items()}


def mean_difference(
    from_engine: Mapping[int, Sequence[float]], from_trainer: Sequence[Sequence[float]]
) -> float | None:
    """Mean absolute difference over the tokens that both sides know; None when there are none."""
    apart, num_tokens = 0.0, 0
    for place, logprobs in from_engine.items():
        if len(logprobs) != len(from_trainer[place]):
            raise ValueError(f"{len(logprobs)} and {len(from_trainer[place])} log-probs of answer {place}")
        apart += sum(map(abs, map(sub, logprobs, from_trainer[place])))  # on the event loop: a third of a loop's time
        num_tokens += len(logprobs)
    return apart / num_tokens if num_tokens else None


def written_by(weights: Weights, answers: Mapping[int, ScoredSample]) -> dict[int, Sequence[float]]:
    """Log-probs of the answers that these weights wrote, as many as COMPARED_TOKENS need."""
    found, num_tokens = dict[int, Sequence[float]](), 0
    for place, scored in answers.items():
        if num_tokens >= COMPARED_TOKENS:
            break
        if scored.sample.token_ids and all(span.weights == weights for span in scored.sample.spans):
            found[place] = scored.sample.logprobs
            num_tokens += len(scored.sample.logprobs)
    return found


def _answers(batch: Batch) -> list[ScoredSample]:
    return list(chain.from_iterable(group.samples for group in batch.groups))
