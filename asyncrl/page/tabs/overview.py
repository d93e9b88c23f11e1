"""The tab *Overview*: the curves of one run or several, and their alarms."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from asyncrl.metrics.words import duration, percent, share, who_waits
from asyncrl.page.runs.rows import Points, Rows
from asyncrl.page.runs.run_files import RunFiles
from asyncrl.page.tabs.alarms import alarms_of, is_watched
from asyncrl.page.tabs.charts import COLOURS, Line, lines
from asyncrl.page.tabs.tab import PageRequest, Views


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One figure: numbers over the training steps."""

    title: str
    names: Mapping[str, str]
    """The label of each metric."""
    unit: str = ""
    says: str
    """A sentence on how to read it."""


PANELS: Sequence[Panel] = (
    Panel(
        title="Reward",
        names={"reward/mean": "training prompts", "eval/accuracy": "held-out prompts"},
        unit="mean reward",
        says="Training prompts are counted after the filter; held-out prompts are not trained.",
    ),
    Panel(
        title="Spread of the reward",
        names={"reward/std": "standard deviation"},
        unit="reward",
        says="At 0, all answers get the same reward, and there is nothing to learn from.",
    ),
    Panel(title="Loss", names={"train/loss": "loss"}, says="The loss of policy gradients need not fall."),
    Panel(
        title="Gradient norm",
        names={"train/grad_norm": "before clipping"},
        says="A jump by ten times often comes before a collapse.",
    ),
    Panel(
        title="Entropy",
        names={"train/entropy": "entropy"},
        unit="nat per token",
        says="A policy whose entropy falls to 0 explores nothing any more.",
    ),
    Panel(
        title="KL",
        names={"train/kl": "from the reference model", "train/reward_kl": "subtracted from rewards"},
        unit="nat per token",
        says="The distance of the policy from the reference model.",
    ),
    Panel(
        title="Clipped tokens",
        names={"train/clip_fraction": "clipped", "train/tis_outside": "outside the bounds of TIS"},
        unit="share",
        says="Old data pushes ratios of probabilities out of the clip range.",
    ),
    Panel(
        title="Log-probs of engine and trainer",
        names={"train/logprob_diff": "under the same weights", "mismatch/logprob_mean": "as sampled"},
        unit="nat",
        says="Under the same weights, the difference is rounding: it stays small and level in a sound run.",
    ),
    Panel(
        title="Lag",
        names={"lag/max": "largest", "lag/mean": "mean"},
        unit="steps",
        says="The steps between the weights that wrote a token and the step that trained it.",
    ),
    Panel(
        title="Length of answers",
        names={"response/tokens_mean": "mean", "response/tokens_max": "longest"},
        unit="tokens",
        says="Answers that grow with the reward are longer reasoning; growth alone may be repetition.",
    ),
    Panel(
        title="Answers cut at the limit",
        names={"response/truncated": "cut"},
        unit="share",
        says="Near 1, most answers reach --rollout-max-response-len before they end.",
    ),
    Panel(
        title="Throughput",
        names={
            "throughput/tokens_generated_per_s": "generated",
            "throughput/tokens_trained_per_s": "trained",
        },
        unit="tokens per second",
        says="Tokens within each step, divided by its duration.",
    ),
    Panel(
        title="Samples in flight",
        names={"samples/in_flight": "in flight", "samples/limit": "limit"},
        unit="samples",
        says="Far below the limit, the engines are partly empty.",
    ),
)
FATES = ("trained", "masked", "filtered", "stale", "failed")
"""Ends of generated tokens; the numbers are counted from the beginning of the run."""
_SUMMED = 40
"""Steps over which the summary at the top is computed."""


def show(request: PageRequest) -> Mapping[str, Any]:
    """Return the values of the template."""
    is_whole = not request.is_first or all(map(is_watched, request.runs))
    return {
        "facts": [(run, list(_facts(run))) for run in request.runs],
        "alarms": [(run, alarms_of(run)) for run in request.runs] if is_whole else [],
        "is_whole": is_whole,
        "panels": [*_panels(request.runs), *_held_out(request.runs), *_shares(request.run)],
    }


def _panels(runs: Sequence[RunFiles]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield title, sentence and figure of each panel that has numbers."""
    for panel in PANELS:
        parts = [
            Line(
                label=_label(label, run, runs),
                points=run.rows.points(name),
                dash=place > 0,
                colour=None if len(runs) == 1 else COLOURS[position % len(COLOURS)],
            )
            for position, run in enumerate(runs)
            for place, (name, label) in enumerate(panel.names.items())
            if run.rows.points(name)[0]
        ]
        if parts:
            yield panel.title, panel.says, lines(parts, unit=panel.unit)


def _held_out(runs: Sequence[RunFiles]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield one figure of all held-out sets, over the step of the evaluated weights."""
    parts = [
        Line(label=_label(name.split("/")[1], run, runs), points=_over_eval_step(run.rows, name))
        for run in runs
        for name in run.rows.names()
        if name.startswith("eval/") and name.endswith("/reward")
    ]
    if parts:
        yield "Held-out sets", "Mean reward of each set, over the step of the evaluated weights.", lines(parts)


def _over_eval_step(rows: Rows, name: str) -> Points:
    steps, values = rows.points(name)
    evaluated = [rows.number("eval/step", step) for step in steps]
    return [step if weights is None else int(weights) for step, weights in zip(steps, evaluated, strict=True)], values


def _shares(run: RunFiles) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield what became of each step's tokens, and where the time of each step went."""
    fates = [Line(label=fate, points=_increase(run.rows.points(f"tokens/{fate}")), fills=True) for fate in FATES]
    if any(part.points[0] for part in fates):
        yield "Tokens by fate", "What became of the tokens that were settled in each step.", lines(fates, unit="tokens")
    waits = {
        "trainer waited": "time/trainer_waited_s",
        "trained": "time/train_s",
        "late update": "time/late_update_s",
        "weights copied": "time/update_wait_s",
        "checkpoint": "time/checkpoint_s",
    }
    times = [Line(label=label, points=run.rows.points(name), fills=True) for label, name in waits.items()]
    idle = Line(label="engines idle", points=run.rows.points("time/engines_idle_s"), dash=True, colour="#111827")
    if any(part.points[0] for part in times):
        says = "The areas add up to the trainer's time; the dotted line is the time without any sample in flight."
        yield "Who waits for whom", says, lines([*times, idle], unit="seconds of each step")


def _increase(points: Points) -> Points:
    """Return by how much a number grew in each step; a resumed run that counts again from less grew by nothing."""
    steps, values = points
    return steps, [max(0.0, value - before) for before, value in pairwise([0.0, *values])]


def _label(label: str, run: RunFiles, runs: Sequence[RunFiles]) -> str:
    return label if len(runs) == 1 else f"{run.name}: {label}"


def _facts(run: RunFiles) -> Iterator[tuple[str, str]]:
    """Yield name and value of what a person wants to know first."""
    rows, status = run.rows, run.status
    steps = rows.steps()
    target = run.settings().get("num-rollout")
    yield "State", run.state.value
    yield "Steps", f"{steps[-1] + 1 if steps else 0}{f' of {target}' if target else ''}"
    if (lasted_s := run.duration_s()) is not None:
        yield "Time", duration(lasted_s)
    if steps:
        yield from _means(rows, steps[-_SUMMED:])
    if status is not None and status.reason:
        yield "Ended by", status.reason
    if rows.num_torn:
        torn = "1 line" if rows.num_torn == 1 else f"{rows.num_torn:,} lines"
        yield "Skipped", f"{torn} of metrics.jsonl cannot be read"


def _means(rows: Rows, steps: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield numbers of the last steps."""
    whole, waited, idle = (_sum(rows, f"time/{name}_s", steps) for name in ("step", "trainer_waited", "engines_idle"))
    for title, name in (("Reward", "reward/mean"), ("Held-out", "eval/accuracy")):
        value = rows.last(name)
        if value is not None:
            yield title, f"{value:.3f}"
    yield "Step time", f"{share(whole, len(steps)):.2f} s"
    yield "Bottleneck", who_waits(share(waited, whole), share(idle, whole))
    filled, limit = (_sum(rows, f"samples/{name}", steps) for name in ("in_flight", "limit"))
    yield "Slots in use", percent(share(filled, limit))


def _sum(rows: Rows, name: str, steps: Sequence[int]) -> float:
    return sum(rows.number(name, step) or 0.0 for step in steps)


VIEWS = Views(show=show)
