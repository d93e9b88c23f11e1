"""The predictions as a table, and the verdict on their errors."""

from collections.abc import Sequence

from rich.table import Table

from asyncrl.sim.search.targets import Verdict
from benchmarks.predict.predicted import Predicted, ratio

BASE = "sync"
"""The synchronous arrangement that can be simulated."""
MOST_OFF = 0.1
"""Largest error of a ratio, as a share of the measured one."""
_COLUMNS = (
    "arrangement",
    "steps",
    "measured\ntokens/s",
    "simulated\ntokens/s",
    "off by",
    "times sync\nmeasured",
    "times sync\nsimulated",
    "off by",
)


def prediction(seen: Sequence[Predicted], title: str) -> Table:
    """A table with one row for each arrangement."""
    table = Table(title=title, title_justify="left")
    for place, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if place == 0 else "right", no_wrap=True)
    base = _base(seen)
    for each in seen:
        table.add_row(*_cells(each, base))
    return table


def ratio_verdicts(seen: Sequence[Predicted]) -> list[Verdict]:
    """The verdict on the predicted ratio of each arrangement to ``sync``."""
    base = _base(seen)
    ratios = [ratio(each, base) for each in seen if base is not None and each is not base]
    return [
        Verdict(
            text=f"{each.arrangement} over {BASE}, off by at most", value=abs(each.error), limit=MOST_OFF, at_most=True
        )
        for each in ratios
    ]


def _base(seen: Sequence[Predicted]) -> Predicted | None:
    return next((each for each in seen if each.arrangement == BASE), None)


def _cells(each: Predicted, base: Predicted | None) -> list[str]:
    rates = [f"{each.measured:,.0f}", f"{each.simulated:,.0f}", f"{each.error:+.1%}"]
    times = ratio(each, base) if base is not None and each is not base else None
    shown = [f"{times.measured:.2f}", f"{times.simulated:.2f}", f"{times.error:+.1%}"] if times else ["", "", ""]
    return [each.arrangement, f"{each.num_steps}", *rates, *shown]
