"""The comparison as a table."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from asyncrl.sim.search.policies import ONE_STEP, SYNC
from asyncrl.sim.search.search import SearchResult
from asyncrl.sim.search.targets import Verdict

_COLUMNS = (
    "policy",
    "GPUs\nroll+train",
    "N",
    "k",
    "trained\ntokens/s",
    "±",
    "times\nsync",
    "times\none-step",
    "of the\nideal",
    "with\nmasked",
    "step\ns",
    "trainer\nidle",
    "engines\nidle",
    "slots\nfilled",
    "lag\nmean/max",
    "masked",
    "stale",
    "failed",
    "pre-\nfilled\nagain",
    "fil-\ntered",
)


def comparison(found: Mapping[str, SearchResult], ideal: float, title: str) -> Table:
    """A table with one row for each policy at its best setting."""
    table = Table(title=title, title_justify="left")
    for place, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if place == 0 else "right", no_wrap=True)
    for name, each in found.items():
        table.add_row(name, *_cells(each, found, ideal))
    return table


def _cells(each: SearchResult, found: Mapping[str, SearchResult], ideal: float) -> list[str]:
    setting, result = each.setting, each.outcome
    shares = (result.masked, result.stale, result.failed, result.recomputed, result.filtered)
    return [
        f"{setting.rollout_gpus}+{setting.gpus - setting.rollout_gpus}",
        f"{setting.slots_per_engine}",
        f"{setting.schedule.interval}",
        f"{result.trained_per_s:,.0f}",
        f"{each.spread / 2:.1%}",
        _ratio(each, found.get(SYNC)),
        _ratio(each, found.get(ONE_STEP)),
        f"{result.trained_per_s / ideal:.3f}",
        f"{result.in_batches_per_s / ideal:.3f}",
        f"{result.step_s:.4g}",
        f"{result.trainer_idle:.0%}",
        f"{result.engines_idle:.0%}",
        f"{result.slots_filled:.0%}",
        f"{result.lag_mean:.2f}/{result.lag_max}",
        *(f"{share:.1%}" for share in shares),
    ]


def _ratio(each: SearchResult, to: SearchResult | None) -> str:
    return f"{each.outcome.trained_per_s / to.outcome.trained_per_s:.2f}" if to else ""


def checks(verdicts: Sequence[Verdict]) -> Table:
    """A table with one row for each target."""
    table = Table(title="targets", title_justify="left")
    for name in ("", "target", "measured", "required"):
        table.add_column(name)
    for verdict in verdicts:
        table.add_row(_word(verdict), verdict.text, f"{verdict.value:.3f}", _required(verdict))
    return table


def _word(verdict: Verdict) -> str:
    if verdict.limit is None:
        return ""
    return "[green]holds" if verdict.holds else "[red]FAILS"


def _required(verdict: Verdict) -> str:
    if verdict.limit is None:
        return ""
    return f"{'<=' if verdict.at_most else '>='} {verdict.limit:g}"
