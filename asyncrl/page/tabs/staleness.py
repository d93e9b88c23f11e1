"""The tab *Staleness*: which versions of the weights wrote the tokens of each step."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncrl.page.runs.rows import Rows
from asyncrl.page.runs.run_files import RunFiles
from asyncrl.page.sample_index.versions import MOST_LAGS, LagShare, VersionShare, between, by_lag
from asyncrl.page.tabs.charts import Line, axis, figure, lines, smoothed
from asyncrl.page.tabs.samples import index_of, progress_facts
from asyncrl.page.tabs.tab import PageRequest, Views

MOST_POINTS = 500
"""Steps of the stacked figure, or stretches of several steps."""
SHOWN_STEPS = 60
"""Newest steps of the map of versions, unless the user chooses others."""
MOST_STEPS = 400
"""Steps of the map of versions at most."""
_AVERAGED = 40
"""Newest steps over which the difference of each lag is averaged."""
_LAG_COLOURS = ("#1e3a8a", "#0ea5e9", "#eab308", "#f97316", "#b91c1c", "#701a75", "#111827")
"""Colours of the lags from 0; they differ in lightness as well."""
_AGES = "mismatch/age/"

type Panel = tuple[str, str, Mapping[str, Any]]
"""Title, how to read it, and the figure."""


def show(request: PageRequest) -> Mapping[str, Any]:
    """Return the values of the template."""
    run, index = request.run, index_of(request.run)
    progress = index.refresh(last_step=run.rows.last_step)
    shares = by_lag(index.cursor(), MOST_POINTS)
    steps = index.steps()
    first, last = _range(request, steps)
    panels = [*_by_lag(shares), *_mean_lag(run, shares), *_by_version(between(index.cursor(), first, last))]
    return {
        "facts": list(progress_facts(progress)),
        "is_incomplete": not progress.is_complete,
        "problems": progress.problems,
        "has_files": progress.num_files > 0,
        "range": [request.query.get(name, "") for name in ("from", "to")],
        "most_steps": MOST_STEPS,
        "panels": [*panels, *_differences(run.rows)],
        "totals": _totals(shares),
    }


def _range(request: PageRequest, steps: Sequence[int]) -> tuple[int, int]:
    """Return the first and the last step of the map of versions."""
    newest = steps[-1] if steps else 0
    last = request.number("to", newest, most=2**31 - 1)
    first = request.number("from", max(0, last - SHOWN_STEPS + 1), most=last)
    return max(first, last - MOST_STEPS + 1), last


def _by_lag(shares: Sequence[LagShare]) -> Iterator[Panel]:
    steps = sorted({share.step for share in shares})
    tokens: dict[int, dict[int, int]] = defaultdict(dict)
    for share in shares:
        tokens[share.lag][share.step] = share.tokens
    whole = {step: sum(found.get(step, 0) for found in tokens.values()) for step in steps}
    parts = [
        Line(
            label=_lag_label(lag),
            points=(steps, [tokens[lag].get(step, 0) / whole[step] for step in steps]),
            fills=True,
            colour=_colour(lag),
        )
        for lag in sorted(tokens)
    ]
    if parts:
        says = "Each area is the part of a step's trained tokens with this lag: the steps between writing and training."
        yield "Trained tokens by lag", says, _in_percent(lines(parts, unit="share of trained tokens", height=300))


def _in_percent(drawing: dict[str, Any]) -> dict[str, Any]:
    drawing["layout"]["yaxis"] |= {"tickformat": ".0%", "range": [0, 1]}
    return drawing


def _lag_label(lag: int) -> str:
    return f"lag {lag} or more" if lag == MOST_LAGS else f"lag {lag}"


def _colour(lag: int) -> str:
    return _LAG_COLOURS[min(lag, len(_LAG_COLOURS) - 1)]


def _mean_lag(run: RunFiles, shares: Sequence[LagShare]) -> Iterator[Panel]:
    """Yield the mean lag, from the rows of metrics if they have it, else from the index."""
    points = run.rows.points("lag/mean")
    if not points[0]:
        total: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        for share in shares:
            total[share.step][0] += share.lag * share.tokens
            total[share.step][1] += share.tokens
        points = sorted(total), [weighted / tokens for _, (weighted, tokens) in sorted(total.items())]
    parts = [Line(label="mean", points=points), Line(label="largest", points=run.rows.points("lag/max"), dash=True)]
    bound = run.settings().get("max-staleness")
    if isinstance(bound, int) and points[0]:
        ends = [points[0][0], points[0][-1]]
        parts.append(Line(label="--max-staleness", points=(ends, [float(bound)] * 2), colour="#111827"))
    if points[0]:
        says = "The mean over a step's trained tokens; no token exceeds --max-staleness."
        yield "Mean lag", says, lines([part for part in parts if part.points[0]], unit="steps", height=300)


def _by_version(shares: Sequence[VersionShare]) -> Iterator[Panel]:
    if not shares:
        return
    steps = sorted({share.step for share in shares})
    versions = sorted({share.version for share in shares})
    cells: list[list[float | None]] = [[None] * len(steps) for _ in versions]
    columns, rows = ({key: place for place, key in enumerate(keys)} for keys in (steps, versions))
    for share in shares:
        cells[rows[share.version]][columns[share.step]] = share.share
    heatmap = {
        "type": "heatmap",
        "x": steps,
        "y": versions,
        "z": cells,
        "zmin": 0,
        "zmax": 1,
        "colorscale": "Cividis",
        "reversescale": True,
        "xgap": 1,
        "ygap": 1,
        "colorbar": {"tickformat": ".0%", "thickness": 12},
        "hovertemplate": "step %{x}, version %{y}: %{z:.0%} of the trained tokens<extra></extra>",
    }
    drawing = figure([heatmap], height=300, xaxis=axis("training step"), yaxis=axis("version"), hovermode="closest")
    says = (
        f"Steps {steps[0]} to {steps[-1]}: each column is one step's trained tokens by the version that wrote them. "
        "Cells far below the diagonal are old data."
    )
    yield "Versions that wrote each step", says, drawing


def _differences(rows: Rows) -> Iterator[Panel]:
    """Yield the difference of log-probs by lag."""
    ages = sorted(int(name.split("/")[2]) for name in rows.names() if name.startswith(_AGES) and name.endswith("_mean"))
    points = {age: rows.points(f"{_AGES}{age}/logprob_mean") for age in ages}
    width = max((len(steps) for steps, _ in points.values()), default=0) // MOST_POINTS + 1
    parts = [
        Line(
            label=f"lag {age}",
            points=smoothed(points[age], width),
            colour=_colour(age),
        )
        for age in ages
    ]
    if parts:
        newest = [points[age][1][-_AVERAGED:] for age in ages]
        means = [sum(values) / len(values) for values in newest]
        says = "The mean difference between the engine's and the trainer's log-probs, over tokens of one lag."
        says += f" Each point is the mean of {width} steps." if width > 1 else ""
        yield "Log-prob difference by lag", says, lines(parts, unit="nat", height=300)
        bars = {"type": "bar", "x": [f"lag {age}" for age in ages], "y": means, "marker": {"color": "#2563eb"}}
        says = (
            f"The mean over the newest {_AVERAGED} steps that have tokens of the lag. "
            "It grows with the lag, because the policy moves; the value at lag 0 is rounding."
        )
        drawing = figure([bars], height=300, xaxis=axis("lag"), yaxis=axis("nat"), hovermode="closest")
        yield "Log-prob difference against lag", says, drawing


def _totals(shares: Sequence[LagShare]) -> list[tuple[str, int, float]]:
    """Return the lag, the trained tokens and their part of all, over all steps in the index."""
    total: dict[int, int] = defaultdict(int)
    for share in shares:
        total[share.lag] += share.tokens
    whole = sum(total.values())
    return [(_lag_label(lag), tokens, tokens / whole) for lag, tokens in sorted(total.items())]


VIEWS = Views(show=show)
