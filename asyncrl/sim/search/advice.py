"""Advice in words: which setting to change."""

from collections.abc import Mapping, Sequence

from asyncrl.sim.search.search import SearchResult, describe

_WORTH = 0.03
"""Gains below this share are within the error of short runs and not worth a change."""
_IDLE = 0.1
"""A side that waits for less than this share is busy; the live display uses the same limit."""


def advice(found: Mapping[str, SearchResult]) -> list[str]:
    """One line for each of our policies, then the recommended setting."""
    ours = {name: each for name, each in found.items() if each.policy.is_ours}
    lines = [f"{name}: {_about(each)}" for name, each in ours.items()]
    waiting = [each for each in ours.values() if each.setting.schedule.stale == "wait"]
    return lines + (_recommended(waiting) if waiting else [])


def _about(each: SearchResult) -> str:
    """The bottleneck at the setting that was asked about, which is the first one tried."""
    asked, there = each.tried[0]
    best = next(tried for tried in each.tried if describe(tried[0]) == describe(each.setting))
    moved = best[0].rollout_gpus - asked.rollout_gpus
    gain = best[1].trained_per_s / there.trained_per_s - 1
    if gain >= _WORTH and moved:
        engines = abs(moved) // asked.gpus_per_engine
        what = "rollout-bound" if moved > 0 else "training-bound"
        where = "from the trainer to rollout" if moved > 0 else "from rollout to the trainer"
        size = f"{engines} engine{'s' if engines > 1 else ''}"
        return f"{what} at {describe(asked)}: move the GPUs of {size} {where} ({describe(best[0])}): {gain:+.0%}"
    if gain >= _WORTH:
        return f"at {describe(asked)} take {describe(best[0])} instead: {gain:+.0%}"
    return f"{describe(asked)} is right: {_state(each)}"


def _state(each: SearchResult) -> str:
    trainer, engines = each.outcome.trainer_idle, 1 - each.outcome.slots_filled
    if trainer > _IDLE and engines > _IDLE:
        return f"the trainer waits {trainer:.0%} of the time with {engines:.0%} of the slots empty: " + (
            "long answers hold it up, a larger --max-staleness helps"
        )
    if trainer > _IDLE:
        return f"rollout-bound, the trainer waits {trainer:.0%} of the time"
    if engines > _IDLE:
        return f"training-bound, {engines:.0%} of the slots are empty"
    return "both sides work nearly all the time"


def _recommended(waiting: Sequence[SearchResult]) -> list[str]:
    """Flags with the smallest staleness that is nearly as fast as the fastest: fresher data at the same speed."""
    fastest = max(each.outcome.trained_per_s for each in waiting)
    by_staleness = sorted(waiting, key=lambda each: each.setting.schedule.staleness)
    enough = next(each for each in by_staleness if each.outcome.trained_per_s >= (1 - _WORTH) * fastest)
    setting = enough.setting
    flags = (
        f"--max-staleness {setting.schedule.staleness} --update-weights-interval {setting.schedule.interval} "
        f"--sglang-server-concurrency {setting.slots_per_engine}"
    )
    share = enough.outcome.trained_per_s / fastest
    return [
        f"take {flags} with {setting.rollout_gpus} GPUs for rollout and {setting.gpus - setting.rollout_gpus} for the "
        f"trainer: {share:.0%} of the fastest, and no larger staleness is needed for that"
    ]
