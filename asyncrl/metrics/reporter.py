"""The reporter: turns the facts of each step into one row of numbers for every sink."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from asyncrl.metrics.facts import GroupCounts, SchedulerStats, StepFacts, TokenCounts
from asyncrl.metrics.length_bias import LengthStats
from asyncrl.metrics.life_table import LengthSummary
from asyncrl.metrics.sinks import Row, Sink
from asyncrl.plain_text import encodable
from asyncrl.types import (
    FIRST_ARTIFICIAL_CALL,
    Batch,
    EvalReport,
    EvalSetReport,
    FinishReason,
    Sample,
    TrainReport,
    UpdateReport,
    is_usable,
)


class Reporter:
    """Turns facts into rows and writes each row to every sink.

    It reads each token of a batch once (about 6 ns), and the sinks write to files.  With batches of millions of tokens,
    call ``step`` in a thread.  The caller must call ``close``, which closes the sinks.
    """

    def __init__(self, sinks: Sequence[Sink], before: TokenCounts | None = None) -> None:
        """``before``: the token counts that a resumed run starts from."""
        self._sinks = tuple(sinks)
        self._before = before or TokenCounts()

    def step(self, facts: StepFacts) -> Row:
        """Report one step and return its row."""
        return self.write(self.row(facts))

    def row(self, facts: StepFacts) -> Row:
        """Return the row of one step, which is to be given to ``write``.  Call once per step."""
        numbers = row(facts, self._before)
        self._before = facts.scheduler.tokens
        return numbers

    def close(self) -> None:
        """Close every sink, even if one of them raises."""
        with ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close)

    def write(self, numbers: Row) -> Row:
        """Write one row to every sink and return it; names of user code get escapes for what UTF-8 cannot encode."""
        numbers = {encodable(name): value for name, value in numbers.items()}
        for sink in self._sinks:
            sink.write(numbers)
        return numbers


def row(facts: StepFacts, before: TokenCounts) -> dict[str, float | int]:
    """All numbers of one step by name; ``before`` are the token counts at the end of the previous step."""
    return {
        "step": facts.batch.step,
        "version": facts.scheduler.weights.version,
        **_rewards(facts.batch),
        **(_evaluation(facts.evaluation) if facts.evaluation else {}),
        **_lags(facts.batch),
        **_tokens(facts.scheduler.tokens),
        **_groups(facts.scheduler.groups),
        **_scheduler(facts.scheduler),
        **_responses(facts.batch),
        **_routes(facts.batch),
        **(_episodes(facts) if facts.scheduler.episodes else {}),
        **_lengths(facts.scheduler.lengths),
        **_times(facts),
        **(_update(facts.update) if facts.update else {}),
        **({} if facts.num_engines is None else {"engines/serving": facts.num_engines}),
        **({} if facts.num_slow_engines is None else {"engines/slow": facts.num_slow_engines}),
        **_restarts(facts),
        **({} if facts.update_wait_s is None else {"time/update_wait_s": facts.update_wait_s}),
        **({} if facts.hooks_s is None else {"time/hooks_s": facts.hooks_s}),
        **({} if facts.checkpoint_s is None else {"time/checkpoint_s": facts.checkpoint_s}),
        **(_throughput(facts.scheduler.tokens, before, facts.step_s) if facts.step_s > 0 else {}),
        **_training(facts.report),
        **({} if facts.logprob_diff is None else {"train/logprob_diff": facts.logprob_diff}),
        **({} if facts.surprise_ratio is None else {"prompts/surprise_ratio": facts.surprise_ratio}),
        **{f"engine/{number}/logprob_diff": apart for number, apart in facts.engine_logprob_diffs.items()},
        **facts.mismatch,
    }


def _restarts(facts: StepFacts) -> dict[str, float | int]:
    if facts.num_trainer_restarts is None or facts.without_trainer_s is None:
        return {}
    return {"trainer/restarts": facts.num_trainer_restarts, "time/without_training_s": facts.without_trainer_s}


def trained_lags(batch: Batch) -> Iterator[tuple[int, int]]:
    """(lag, trained tokens) of each span of the batch that has trained tokens."""
    for group in batch.groups:
        for scored in group.samples:
            for span in scored.sample.spans:
                trained = scored.loss_mask[span.start : span.stop].count(1)
                if trained:
                    yield batch.step - span.weights.step, trained


def _rewards(batch: Batch) -> dict[str, float | int]:
    rewards = [scored.reward for group in batch.groups for scored in group.samples]
    if not rewards:
        return {}
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)
    return {"reward/mean": mean, "reward/std": math.sqrt(variance), **_reward_parts(batch)}


def _reward_parts(batch: Batch) -> dict[str, float | int]:
    """The mean of each numeric entry of dict rewards, over the samples that have it."""
    values: dict[str, list[float]] = {}
    for group in batch.groups:
        for scored in group.samples:
            for name, value in scored.reward_parts.items():
                if is_usable(value):
                    values.setdefault(name, []).append(value)
    return {f"reward/part/{name}": math.fsum(each) / len(each) for name, each in values.items()}


def _evaluation(report: EvalReport) -> dict[str, float | int]:
    numbers: dict[str, float | int] = {
        "eval/version": report.weights.version,
        "eval/step": report.weights.step,
        "eval/failed": report.num_failed,
    }
    if report.accuracy:
        numbers["eval/accuracy"] = math.fsum(report.accuracy.values()) / len(report.accuracy)
    if len(report.accuracy) > 1:
        numbers |= {f"eval/{name}/accuracy": accuracy for name, accuracy in report.accuracy.items()}
    for name, each in report.sets.items():
        numbers |= {f"eval/{name}/{number}": value for number, value in _eval_set(each).items()}
    return numbers | {f"eval/function/{name}": value for name, value in report.metrics.items()}


def _eval_set(report: EvalSetReport) -> dict[str, float | int]:
    estimates = {"reward": report.mean}
    estimates |= {f"pass@{k}": estimate for k, estimate in report.pass_at.items()}
    estimates |= {f"majority@{k}": estimate for k, estimate in report.majority_at.items()}
    numbers: dict[str, float | int] = {}
    for name, estimate in estimates.items():
        numbers[name] = estimate.value
        if estimate.margin is not None:
            numbers[f"{name}_ci95"] = estimate.margin
    others = {"truncated": report.truncated, "tokens_mean": report.tokens_mean, "tokens_max": report.tokens_max}
    return (
        numbers | {name: value for name, value in others.items() if value is not None} | {"failed": report.num_failed}
    )


def _lags(batch: Batch) -> dict[str, float | int]:
    lags = list(trained_lags(batch))
    if not lags:
        return {}
    tokens = sum(trained for _, trained in lags)
    return {"lag/max": max(lag for lag, _ in lags), "lag/mean": sum(lag * trained for lag, trained in lags) / tokens}


def _tokens(counts: TokenCounts) -> dict[str, float | int]:
    return {
        "tokens/generated": counts.generated,
        "tokens/trained": counts.trained,
        "tokens/masked": counts.masked,
        "tokens/filtered": counts.filtered,
        "tokens/stale": counts.stale,
        "tokens/failed": counts.failed,
        "tokens/held": counts.held,
        "tokens/lost": counts.lost,
    }


def _groups(counts: GroupCounts) -> dict[str, float | int]:
    return {
        "groups/admitted": counts.admitted,
        "groups/trained": counts.trained,
        "groups/filtered": counts.filtered,
        "groups/stale": counts.stale,
        "groups/failed": counts.failed,
        "groups/in_flight": counts.in_flight,
        "groups/partial": counts.partial,
        "groups/buffered": counts.buffered,
        "groups/training": counts.training,
        "prompts/quarantined": counts.quarantined,
    }


def _scheduler(stats: SchedulerStats) -> dict[str, float | int]:
    return {
        "prompts/returned": stats.returned,
        "filter/acceptance": stats.acceptance,
        **{f"filter/{reason}": groups for reason, groups in stats.filter_reasons.items()},
        "retries": stats.retries,
        "aborts": stats.aborts,
        "time/reward_outage_s": stats.outage_s,
        "samples/in_flight": stats.samples_in_flight,
        "samples/slots": stats.slots,
        "samples/limit": stats.slot_limit,
    }


def _responses(batch: Batch) -> dict[str, float | int]:
    samples: list[Sample] = [scored.sample for group in batch.groups for scored in group.samples]
    if not samples:
        return {}
    lengths = [sample.num_generated for sample in samples]
    return {
        "response/tokens_mean": sum(lengths) / len(lengths),
        "response/tokens_max": max(lengths),
        "response/truncated": sum(sample.finish is FinishReason.LENGTH for sample in samples) / len(samples),
    }


def _routes(batch: Batch) -> dict[str, float | int]:
    """The share of positions without a route; nothing if no sample has routes."""
    missing = total = 0
    for group in batch.groups:
        for scored in group.samples:
            sample = scored.sample
            before = group.prompt.token_ids if sample.prompt_ids is None else sample.prompt_ids
            num_positions = len(before) + len(sample.token_ids) - 1
            total += num_positions
            missing += num_positions if sample.routes is None else sample.routes.num_missing
    has_any = any(scored.sample.routes is not None for group in batch.groups for scored in group.samples)
    return {"rollout/routes_missing": missing / total} if has_any and total else {}


def _episodes(facts: StepFacts) -> dict[str, float | int]:
    stats, tokens = facts.scheduler.episodes, facts.scheduler.tokens
    if stats is None:
        return {}
    numbers: dict[str, float | int] = {
        **stats.sums,  # first, because user code names its metrics and must not replace the others
        "tokens/observed": tokens.observed,
        "tokens/trained_copies": tokens.trained_copies,
        "episodes/open": facts.scheduler.episodes_open or 0,
        **{f"episodes/{end}": count for end, count in stats.ended.items()},
        "episodes/tool_s": stats.tool_s,
        "episodes/engine_s": stats.engine_s,
    }
    if stats.tool_s + stats.engine_s > 0:
        numbers["episodes/tool_share"] = stats.tool_s / (stats.tool_s + stats.engine_s)
    if turns := _turns(facts.batch):
        numbers |= {"turns/mean": sum(turns) / len(turns), "turns/max": max(turns)}
    return numbers


def _turns(batch: Batch) -> list[int]:
    """The number of engine calls of each episode of the batch, as far as its samples have them."""
    calls: dict[tuple[int, int], set[int]] = {}
    for group in batch.groups:
        for scored in group.samples:
            of_episode = calls.setdefault((group.group_id, scored.sample.rollout), set())
            of_episode.update(turn.call for turn in scored.sample.turns if turn.call < FIRST_ARTIFICIAL_CALL)
    return [len(each) for each in calls.values()]


def _lengths(stats: LengthStats) -> dict[str, float | int]:
    return {
        **(_summary("started", stats.started) if stats.started else {}),
        **(_summary("let_through", stats.let_through) if stats.let_through else {}),
        "length/ratio": stats.mean_ratio,
        "length/bias": stats.bias,
        "length/bias_by_chance": stats.chance,
        "length/alarm": int(stats.alarm is not None),
        "length/finished": stats.finished,
        "length/cut": stats.cut,
        "length/trained": stats.trained,
        "length/filtered": stats.filtered,
        "length/dropped": stats.dropped,
    }


def _summary(of: str, lengths: LengthSummary) -> dict[str, float | int]:
    return {
        f"length/{of}_mean": lengths.mean,
        f"length/{of}_p50": lengths.p50,
        f"length/{of}_p95": lengths.p95,
    }


def _times(facts: StepFacts) -> dict[str, float | int]:
    return {
        "time/step_s": facts.step_s,
        "time/train_s": facts.train_s,
        "time/late_update_s": facts.late_update_s,
        "time/trainer_waited_s": facts.trainer_waited_s,
        "time/engines_idle_s": facts.engines_idle_s,
        "time/loop_lag_ms": facts.loop_lag_ms,
    }


def _update(report: UpdateReport) -> dict[str, float | int]:
    found: dict[str, float | int] = {"time/update_pause_s": report.pause_s, "time/update_s": report.total_s}
    if (rank := report.rank_bytes) is not None:
        found |= {"update/rank_bytes": rank.received, "update/rank_needed_bytes": rank.needed}
    return found


def _throughput(now: TokenCounts, before: TokenCounts, step_s: float) -> dict[str, float | int]:
    return {
        "throughput/tokens_generated_per_s": (now.generated - before.generated) / step_s,
        "throughput/tokens_trained_per_s": (now.trained - before.trained) / step_s,
    }


def _training(report: TrainReport) -> dict[str, float | int]:
    if not report.has_trainer:
        return {}
    if report.is_skipped:
        return {"train/skipped": 1}
    return {
        "train/skipped": 0,
        "train/loss": report.loss,
        "train/grad_norm": report.grad_norm,
        "train/clip_fraction": report.clip_fraction,
        "train/entropy": report.entropy,
        "train/lr": report.learning_rate,
        **report.metrics,
    }
