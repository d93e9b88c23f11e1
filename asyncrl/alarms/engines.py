"""Rules about engines: their log-probs, weights, failures and speed.

Measured in healthy runs: ``train/logprob_diff`` is 2e-7 to 5e-7 in float32 on a CPU, 0.005 to 0.01 for a mixture and
0.03 for a dense model in bfloat16 on H200s, and stays within a factor of two over a run.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from asyncrl.alarms.history import History
from asyncrl.alarms.rule import Rule

GROWS_BY = 5.0
"""Factor over the smallest value so far."""
LEAST_DIFFERENCE = 0.01
"""Difference in nat below which growth does not matter: replayed routes of older weights add up to 0.003."""
LARGE_DIFFERENCE = 0.2
"""Difference in nat that is too large in any run: seven times the largest that was measured in a healthy one."""
ENGINE_FACTOR = 2.0
ENGINE_LEAST = 0.002
"""Factor over the median of the other engines, which scored the same tokens, and nat that are added to it."""
MISSING_STEPS = 10
"""Steps without new weights, or without a comparison, that are a sign at least."""
MISSING_TIMES = 3
"""The same, in the longest such time before; in the update interval before the first one has passed."""
REMEMBERED = 200
"""Steps that are searched for the longest such time."""
FAILED_SHARE = 0.05
"""Attempts that failed, for each trained answer."""
RECENT = 10
"""Steps over which failures are counted."""
LEAST_FAILED = 10
LATE_MS = 1000.0
"""Median delay of the event loop; on two cores with a load of 50, healthy runs have up to 555 ms."""
LATE_STEPS = 5
"""Steps of that median."""
UNKNOWN = 0.01
"""Share of trained tokens without log-probs of the engine."""


def growing_difference(history: History) -> str | None:
    """Whether log-probs of engines and trainer differ more than before, or far too much."""
    now, (least, _) = history.values("train/logprob_diff")[-1], history.bounds("train/logprob_diff")
    if now < LARGE_DIFFERENCE and now < max(LEAST_DIFFERENCE, GROWS_BY * least):
        return None
    return (
        f"Under the same weights, log-probs of engines and trainer differ by {now:.2g} nat per token; "
        f"the smallest difference of this run was {least:.2g}."
    )


def differing_engine(history: History) -> str | None:
    """Whether the log-probs of one engine differ more than those of the others."""
    found = {name: history.values(name)[-1] for name in history.names("engine/", "/logprob_diff")}
    for name, value in found.items():
        others = median([other for key, other in found.items() if key != name] or [value])
        if value > ENGINE_FACTOR * others + ENGINE_LEAST:
            return (
                f"Log-probs of engine {name.split('/')[1]} differ from the trainer's by {value:.2g} nat per token, "
                f"those of the other engines by {others:.2g}. This engine has other weights than the trainer."
            )
    return None


def no_new_weights(history: History) -> str | None:
    """Whether the engines serve the same weights for long.  Training on saved batches has no engines, and no slots."""
    if history.growth("version", 1) or not history.now("samples/slots"):
        return None
    steps, values = history.steps("version")[-REMEMBERED:], history.values("version")[-REMEMBERED:]
    changed = [step for step, before, now in zip(steps[1:], values, values[1:], strict=False) if now > before]
    return _late(changed or steps[:1], history, "The engines serve the same weights for {} steps.")


def not_compared(history: History) -> str | None:
    """Whether log-probs were compared before, and are no longer."""
    if history.now("train/logprob_diff") is not None:
        return None
    text = "Log-probs of engines and trainer have not been compared for {} steps."
    return _late(history.steps("train/logprob_diff")[-REMEMBERED:], history, text)


def failing_requests(history: History) -> str | None:
    """Whether many attempts fail."""
    failed, trained = history.growth("retries", RECENT), history.increase("length/trained", RECENT)
    if failed is None or trained is None or failed < max(LEAST_FAILED, FAILED_SHARE * trained):
        return None
    return f"{failed:.0f} attempts failed within {RECENT} steps, in which {trained:.0f} answers were trained."


def slow_engine(history: History) -> str | None:
    """Whether an engine was restarted because it is slow."""
    drained = history.increase("engines/slow", min(RECENT, len(history.values("engines/slow")) - 1))
    return f"An engine was far slower than the others and was restarted, {drained:.0f} times." if drained else None


def missing_engine(history: History) -> str | None:
    """Whether fewer engines serve than before."""
    now, (_, most) = history.values("engines/serving")[-1], history.bounds("engines/serving")
    return f"{now:.0f} of {most:.0f} engines serve." if now < most else None


def late_loop(history: History) -> str | None:
    """Whether the event loop is late in most steps."""
    values = history.values("time/loop_lag_ms")[-LATE_STEPS:]
    if len(values) < LATE_STEPS or median(values) < LATE_MS:
        return None
    return f"The driver's event loop is late by {median(values) / 1000:.1f} s in most steps, so engines wait for it."


def unknown_logprobs(history: History) -> str | None:
    """Whether tokens lack the engine's log-probs."""
    share = history.now("train/unknown_logprobs")
    return f"{share:.0%} of the trained tokens have no log-prob of the engine." if share and share > UNKNOWN else None


def _late(seen: Sequence[int], history: History, text: str) -> str | None:
    """Return ``text`` with the steps since the last one in ``seen``, if they are many."""
    if not seen:
        return None
    longest = max((after - before for before, after in pairwise(seen)), default=history.update_interval)
    missing = history.step - seen[-1]
    return text.format(missing) if missing >= max(MISSING_STEPS, MISSING_TIMES * longest) else None


RULES = (
    Rule(
        title="Log-prob difference grows",
        needs=("train/logprob_diff",),
        sign=growing_difference,
        lasts=2,
        look="Engines and trainer do not compute the same model, or weights did not arrive (--check-weight-updates).",
    ),
    Rule(
        title="One engine differs",
        needs=("engine/",),
        sign=differing_engine,
        look="Restart this engine, and look at its log. --check-weight-updates compares the weights of each update.",
    ),
    Rule(
        title="Weights do not arrive",
        needs=("version", "samples/slots", "train/skipped"),  # a run without a trainer lacks the last one
        sign=no_new_weights,
        look="run.log has the failures of weight updates.",
    ),
    Rule(
        title="Log-probs are not compared",
        needs=("step",),
        reads=("train/logprob_diff",),
        sign=not_compared,
        look="Engines are too busy to score tokens, or serve other weights than the trainer holds; see run.log.",
    ),
    Rule(
        title="Requests fail",
        needs=("retries", "length/trained"),
        sign=failing_requests,
        look="run.log and the servers' logs have the causes.",
    ),
    Rule(
        title="An engine is slow",
        needs=("engines/slow",),
        sign=slow_engine,
        look="Look at this engine's machine and GPU.",
    ),
    Rule(
        title="An engine is missing",
        needs=("engines/serving",),
        sign=missing_engine,
        lasts=3,
        look="run.log names it, and its log has the cause.",
    ),
    Rule(
        title="Event loop is late",
        needs=("time/loop_lag_ms",),
        sign=late_loop,
        look="A user function blocks the driver, or the machine has too few free cores; run.log names such functions.",
    ),
    Rule(
        title="Log-probs are missing",
        needs=("train/unknown_logprobs",),
        sign=unknown_logprobs,
        lasts=2,
        look="The trainer uses its own log-probs instead, which hides the age of the data; see run.log.",
    ),
)
