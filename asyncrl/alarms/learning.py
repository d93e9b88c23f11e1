"""Rules about what the model learns: rewards, entropy, gradients.

Healthy runs of the quickstart gave the limits (``tests/unit/alarms/data``): their entropy falls to a quarter within 13
steps, while the reward rises.  Their gradient norm is at most 6.1 times its median, but for a jump to 46 times the
median in one step of one mixture of experts.
"""

from collections.abc import Sequence
from statistics import median

from asyncrl.alarms.history import History
from asyncrl.alarms.rule import Rule

EQUAL = 1e-9
"""Standard deviation of rewards, relative to their mean, that is rounding."""
EQUAL_OF = 5
EQUAL_BATCHES = 4
"""Batches without variance, of the last ``EQUAL_OF``: a single answer may be right by chance."""
WINDOW = 3
"""Steps of a mean: the reward of one batch varies by 0.2 from step to step."""
LOOK_BACK = 10
"""Steps over which a fall is measured."""
FALLS_TO = 0.25
"""Share of the entropy that is left after a collapse."""
MUST_RISE = 0.5
"""Rise of the mean reward, in standard deviations, that justifies such a fall."""
RISES_BY = 2.0
"""Factor of the entropy over its value at the beginning that is a sign."""
RISES_ABOVE = 0.5
"""Entropy in nat per token below which a rise is no sign."""
NORM_JUMPS_BY = 10.0
"""Factor of the gradient norm over its median."""
NORM_STEPS = 20
"""Steps of that median, of which at least ``NORM_LEAST`` must be there, and steps within which two jumps are a sign."""
NORM_LEAST = 5
CLIPPED = 0.3
"""Share of clipped tokens; healthy runs have at most 0.09."""
SKIPPED_OF = 10
"""Steps among which two that are skipped are a sign."""


def equal_rewards(history: History) -> str | None:
    """Whether all answers get the same reward, in most batches."""
    spreads, mean = history.values("reward/std")[-EQUAL_OF:], history.values("reward/mean")[-1]
    count = sum(spread <= EQUAL * max(1.0, abs(mean)) for spread in spreads)
    if count < EQUAL_BATCHES:
        return None
    return (
        f"In {count} of the last {EQUAL_OF} batches, all answers got the same reward, {mean:.3g} in the last one: "
        "there is nothing to learn from."
    )


def collapsed_entropy(history: History) -> str | None:
    """Whether the entropy fell by a large factor without a rise of the reward."""
    name, reward = "train/entropy", "reward/mean"
    ago = min(LOOK_BACK, len(history.values(name)) - WINDOW)
    recent = history.values(name)[-LOOK_BACK - WINDOW :]
    now = recent[-1]
    if ago < 1 or len(history.values(reward)) < ago + WINDOW or now > FALLS_TO * max(recent):
        return None
    before = max(history.mean(name, WINDOW, ago=back) or 0.0 for back in range(1, ago + 1))
    rise = (history.mean(reward, WINDOW) or 0.0) - (history.mean(reward, WINDOW, ago=ago) or 0.0)
    spread = history.mean("reward/std", WINDOW, ago=ago) or 0.0
    if now > FALLS_TO * before or rise > MUST_RISE * spread:
        return None
    return (
        f"The entropy fell from {before:.3g} to {now:.3g} nat per token within {ago + WINDOW} steps, "
        f"while the mean reward changed by {rise:+.2g}."
    )


def rising_entropy(history: History) -> str | None:
    """Whether the entropy is far above its beginning."""
    values = history.values("train/entropy")
    if len(values) < WINDOW:
        return None
    first, now = median(values[:WINDOW]), values[-1]
    if now < max(RISES_ABOVE, RISES_BY * first):
        return None
    return f"The entropy is {now:.3g} nat per token, and was {first:.3g} at the beginning: answers become noise."


def jumping_norm(history: History) -> str | None:
    """Whether the gradient norm is far above its median for the second time; ``--clip-grad`` bounds a single jump."""
    norms = history.values("train/grad_norm")
    if _jump(norms, len(norms) - 1) is None:  # nearly always; the page asks for each of 10,000 steps
        return None
    jumps = [_jump(norms, place) for place in range(max(0, len(norms) - NORM_STEPS), len(norms))]
    *earlier, now = (jump for jump in jumps if jump is not None)
    if not earlier:
        return None
    again = f"and it jumped before within {NORM_STEPS} steps"
    return f"The gradient norm is {norms[-1]:.3g}, {now:.0f} times its median, {again}."


def _jump(norms: Sequence[float], place: int) -> float | None:
    """Return the factor of a norm over the median of those before it; None if that is no jump."""
    before = norms[max(0, place - NORM_STEPS) : place]
    usual = median(before) if len(before) >= NORM_LEAST else 0.0
    return norms[place] / usual if usual and norms[place] >= NORM_JUMPS_BY * usual else None


def clipped(history: History) -> str | None:
    """Whether many tokens are outside of the clip range."""
    share = history.now("train/clip_fraction")
    if share is None or share < CLIPPED:
        return None
    return f"{share:.0%} of the trained tokens are outside of the clip range: a step changes the policy too much."


def skipped(history: History) -> str | None:
    """Whether batches are skipped."""
    count = sum(history.values("train/skipped")[-SKIPPED_OF:])
    return (
        f"{count:.0f} of the last {SKIPPED_OF} batches were skipped: loss or gradient not finite."
        if count > 1
        else None
    )


RULES = (
    Rule(
        title="Reward without variance",
        needs=("reward/std", "reward/mean"),
        sign=equal_rewards,
        look="Look at some answers and their rewards: the reward function, the labels and the chat template.",
    ),
    Rule(
        title="Entropy has collapsed",
        needs=("train/entropy", "reward/mean", "reward/std"),
        sign=collapsed_entropy,
        look="The policy explores hardly anything. Lower the learning rate, or add --entropy-coef or a KL loss.",
    ),
    Rule(
        title="Entropy rises",
        needs=("train/entropy",),
        sign=rising_entropy,
        lasts=2,
        look="Lower the learning rate, and look at the answers.",
    ),
    Rule(
        title="Gradient norm jumps",
        needs=("train/grad_norm",),
        sign=jumping_norm,
        look="Look at the batches of these steps. Lower the learning rate or --clip-grad.",
    ),
    Rule(
        title="Many tokens are clipped",
        needs=("train/clip_fraction",),
        sign=clipped,
        lasts=3,
        look="Lower the learning rate, or the staleness.",
    ),
    Rule(
        title="Batches are skipped",
        needs=("train/skipped",),
        sign=skipped,
        look="run.log names the cause of each. Lower the learning rate, and look at rewards and log-probs.",
    ),
)
