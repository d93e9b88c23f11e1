"""Hand-made facts; the tests derive the expected figures from them."""

from array import array
from dataclasses import replace

import numpy as np

from asyncrl.metrics.facts import EpisodeStats, GroupCounts, SchedulerStats, StepFacts, TokenCounts
from asyncrl.metrics.length_bias import LengthBias, LengthStats
from asyncrl.token_columns import Routes
from asyncrl.types import (
    Batch,
    Estimate,
    EvalReport,
    EvalSetReport,
    FinishReason,
    GroupId,
    Prompt,
    RankBytes,
    Sample,
    ScoredGroup,
    ScoredSample,
    Span,
    TrainReport,
    Turn,
    UpdateReport,
    Weights,
)

TOKENS = TokenCounts(generated=1000, trained=600, masked=50, filtered=200, stale=40, failed=10, held=100)
GROUPS = GroupCounts(admitted=28, trained=12, filtered=6, stale=2, failed=1, in_flight=4, buffered=3, training=0)


def weights(step: int) -> Weights:
    return Weights(version=step, step=step)


def scored(
    index: int, reward: float, loss_mask: tuple[int, ...], *spans: tuple[int, int, int], cut: bool = False
) -> ScoredSample:
    """A scored sample; each of ``spans`` is (step of the weights, start, stop)."""
    sample = Sample(
        index=index,
        token_ids=(7,) * len(loss_mask),
        logprobs=array("f", [-0.5]) * len(loss_mask),
        spans=tuple(Span(weights=weights(step), start=start, stop=stop) for step, start, stop in spans),
        text="",
        finish=FinishReason.LENGTH if cut else FinishReason.STOP,
        seconds=1.0,
    )
    return ScoredSample(sample=sample, reward=reward, loss_mask=loss_mask)


def group(group_id: int, *samples: ScoredSample) -> ScoredGroup:
    prompt = Prompt(row=0, epoch=0, text="1+1=", token_ids=(1, 2), label="2")
    return ScoredGroup(group_id=GroupId(group_id), prompt=prompt, dispatched=weights(3), samples=samples)


def batch(step: int = 5) -> Batch:
    """Four answers of 4, 3, 2 and 6 tokens; 5 trained tokens have lag 1 and 7 have lag 0."""
    first = group(
        0,
        scored(0, 1.0, (1, 1, 1, 1), (step - 1, 0, 4)),
        scored(1, 0.0, (1, 1, 0), (step - 1, 0, 1), (step, 1, 3), cut=True),
    )
    second = group(
        1,
        scored(0, 0.5, (0, 0), (step - 2, 0, 2)),
        scored(1, 1.0, (1, 1, 1, 1, 1, 1), (step, 0, 6)),
    )
    return Batch(step=step, groups=(first, second))


def scheduler(tokens: TokenCounts = TOKENS, step: int = 5) -> SchedulerStats:
    return SchedulerStats(
        tokens=tokens,
        groups=GROUPS,
        filter_reasons={"all rewards equal": 4, "too long": 2},
        acceptance=0.75,
        returned=1,
        retries=3,
        aborts=2,
        samples_in_flight=13,
        slots=16,
        slot_limit=14,
        weights=weights(step + 1),
        lengths=lengths(),
    )


def with_episodes(found: StepFacts) -> StepFacts:
    """The facts of a run with episodes: one episode of the batch has two turns and an observation, the others one."""
    first, *groups = found.batch.groups
    whole, *samples = first.samples
    turns = tuple(Turn(call=call, start=2 * call, stop=2 * call + 1, finish=FinishReason.STOP) for call in range(2))
    spans = tuple(Span(weights=weights(4), start=turn.start, stop=turn.stop) for turn in turns)
    sample = replace(whole.sample, turns=turns, spans=spans)
    group_of_turns = replace(first, samples=(replace(whole, sample=sample, loss_mask=(1, 0, 1, 0)), *samples))
    ended = {"finished": 7, "max_turns": 1, "context_full": 2, "tool_failed": 3, "cancelled": 4, "failed": 5}
    stats = EpisodeStats(ended=ended, tool_s=6.0, engine_s=2.0, sums=SUMS)
    tokens = replace(TOKENS, observed=11, trained_copies=12)
    return replace(
        found,
        batch=replace(found.batch, groups=(group_of_turns, *groups)),
        scheduler=replace(found.scheduler, episodes=stats, episodes_open=9, tokens=tokens),
    )


SUMS = {"episodes/branches/edited": 3.0, "episodes/tool_calls": 8.0, "episodes/tool_errors": 1.0} | {
    f"episodes/{name}": 1.0
    for name in (
        "dropped_tokens",
        "retokenized_tokens",
        "unmatched_tokens",
        "moved_tokens",
        "logprobs_differ",
        "cut_tokens",
    )
}


def lengths() -> LengthStats:
    """Statistics of eight answers of 4 tokens, four of them trained, and of two answers in flight."""
    counted = LengthBias(2)
    for _ in range(8):
        counted.finished(4)
    for _ in range(4):
        counted.trained(4)
    return counted.stats((1, 3))


def evaluation(step: int, **accuracy: float) -> EvalReport:
    return EvalReport(
        weights=weights(step),
        newest=weights(step),
        accuracy=accuracy,
        num_samples=8,
        num_failed=1,
        num_tokens=80,
        seconds=2.0,
    )


def evaluated_set(mean: float) -> EvalSetReport:
    """The numbers of a set with four answers per prompt."""
    return EvalSetReport(
        mean=Estimate(mean, 0.05),
        pass_at={1: Estimate(mean, 0.05), 4: Estimate(0.75, None)},
        majority_at={4: Estimate(0.625, 0.02)},
        truncated=0.125,
        tokens_mean=10.0,
        tokens_max=20,
        num_failed=1,
    )


def facts(
    step: int = 5,
    *,
    tokens: TokenCounts = TOKENS,
    update: UpdateReport | None = None,
    evaluated: EvalReport | None = None,
    trainer_waited_s: float = 1.0,
    engines_idle_s: float = 0.5,
    logprob_diff: float | None = None,
) -> StepFacts:
    """The facts of a step of 4 seconds."""
    report = TrainReport(
        loss=0.25,
        grad_norm=1.5,
        clip_fraction=0.125,
        entropy=2.0,
        learning_rate=1e-6,
        seconds=2.5,
        logprobs=(),
        metrics=ALGORITHM,
    )
    return StepFacts(
        batch=batch(step),
        report=report,
        update=update,
        evaluation=evaluated,
        scheduler=scheduler(tokens, step),
        trainer_waited_s=trainer_waited_s,
        engines_idle_s=engines_idle_s,
        train_s=2.75,
        late_update_s=0.5,
        step_s=4.0,
        loop_lag_ms=1.5,
        num_engines=2,
        num_slow_engines=1,
        num_trainer_restarts=1,
        without_trainer_s=12.5,
        logprob_diff=logprob_diff,
        update_wait_s=None if update is None else 0.25,
        surprise_ratio=0.25,
        engine_logprob_diffs={0: 0.01, 1: 0.02},
        mismatch=MISMATCH,
    )


MISMATCH = {
    "mismatch/logprob_mean": 0.01,
    "mismatch/logprob_p99": 0.1,
    "mismatch/logprob_max": 0.5,
    "mismatch/k3": 1e-3,
}


ALGORITHM = {
    "train/kl": 0.01,
    "train/reward_kl": 0.02,
    "train/tis_weight": 0.98,
    "train/tis_outside": 0.03,
    "train/tis_removed": 0.02,
    "train/unknown_logprobs": 0.05,
    "train/repeated_passes": 1.0,
    "train/routes_differ": 0.03,
    "routes_differ/age/0": 0.01,
    "routes_differ/position/0": 0.03,
    "train/routes_missing": 0.01,
    "train/opsm_masked": 0.04,
    "train/score_subtracted": 0.1,
    "train/score_uncentered": 0.0,
    "train/value_loss": 0.2,
    "train/value_clip_fraction": 0.05,
    "train/critic_grad_norm": 1.25,
    "train/peak_memory_gb": 105.5,
}
"""Metrics that only some algorithms report."""
UPDATE = UpdateReport(pause_s=0.02, total_s=0.25, num_bytes=4096, rank_bytes=RankBytes(received=2048, needed=2000))


def with_routes(given: StepFacts) -> StepFacts:
    """The facts with routes of the first sample, of which one position is missing."""
    first, *others = given.batch.groups
    scored, *rest = first.samples
    num_positions = len(first.prompt.token_ids) + len(scored.sample.token_ids) - 1
    routes = Routes(experts_NLK=np.zeros((num_positions, 2, 2), np.uint8), missing=((0, 1),))
    changed = replace(scored, sample=replace(scored.sample, routes=routes))
    return replace(given, batch=replace(given.batch, groups=(replace(first, samples=(changed, *rest)), *others)))
