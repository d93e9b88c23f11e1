"""The figures as a table, as Markdown and as a picture."""

from collections.abc import Iterator, Mapping
from math import isinf

from rich.box import SIMPLE_HEAD
from rich.table import Table

from asyncrl.sim.search.svg import rect, text
from benchmarks.sync_vs_async.figures import (
    ENOUGH_REPEATS,
    FULL_FROM,
    Figures,
    Ideal,
    Results,
    Setup,
    Spread,
)
from benchmarks.sync_vs_async.mismatch import mismatch_table

BASES, COLLECTING = ("sync", "sync-colocate"), "one-step"
"""The arrangements that the others are compared with: the better one of the former, and the latter."""
COLUMNS = (
    "arrangement",
    "steps",
    "trained tokens/s",
    "±",
    "times sync",
    "times one-step",
    "of the split's ideal",
    "of the ideal",
    "step s",
    "±",
    "trainer idle",
    "engines idle",
    "slots filled",
    "lag mean/max",
    "pause ms median/max",
    "tokens generated",
    "trained",
    "thrown away",
    "held",
    "aborted",
    "log-prob diff",
)
STEADY = 0.1
"""Largest change of the tokens held, as a share of the trained ones; beyond it, the rate cannot be sustained."""
_COLOURS = dict.fromkeys(BASES, "#4e79a7") | {COLLECTING: "#f28e2b"}
_OURS = "#59a14f"
_TRAINER, _ENGINES, _SLOTS = "#e15759", "#edc948", "#bab0ac"
_WIDTH, _ROW, _TOP, _LEFT, _BAR, _SHARES = 1100, 56, 84, 130, 450, 300


def rows(results: Results) -> list[tuple[str, ...]]:
    """One row of texts for each arrangement that has a step."""
    found = results.figures
    return [_cells(each, found, results.ideal) for each in found.values()]


def table(results: Results) -> Table:
    """The table for a terminal."""
    shown = Table(
        title=title(results.setup),
        title_justify="left",
        caption=footnote(results),
        caption_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for place, name in enumerate(COLUMNS):
        shown.add_column(name.replace(" ", "\n"), justify="left" if place == 0 else "right", no_wrap=True)
    for cells in rows(results):
        shown.add_row(*cells)
    return shown


def markdown(results: Results, about: Mapping[str, object]) -> str:
    """The table as Markdown, with ``about``: the circumstances of the measurement."""
    lines = [f"# {title(results.setup)}", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|---" + "|--:" * (len(COLUMNS) - 1) + "|"]
    lines += ["| " + " | ".join(cells) + " |" for cells in rows(results)]
    return "\n".join([*lines, *mismatch_table(results), "", footnote(results), ""])


def title(setup: Setup) -> str:
    """The setup in one line."""
    split = ", ".join(f"{name} {value}" for name, value in setup.parallel.items())
    updates = {None: "", True: ", updates during training", False: ", updates between steps"}
    return (
        f"{setup.model} on {setup.device}: {setup.trainer_gpus} for training{f' ({split})' if split else ''}, "
        f"{setup.engine_gpus} for engines of {setup.slots} slots; {setup.groups} x {setup.group_size} samples per "
        f"step, prompts of {setup.prompt_tokens}, answers of {setup.median} (median) to {setup.longest} tokens"
        f"{updates[setup.updates_beside_training]}"
    )


def footnote(results: Results) -> str:
    """The meaning of the columns, and the formula of the ideal."""
    if not results.by_arrangement:
        return "No measured step."
    setup, best = results.setup, results.ideal
    return (
        f"ideal = all useful GPU-seconds / GPUs = {setup.gpus} / ({best.trainer_gpus} / {best.trainer_rate:,.0f} + "
        f"{best.engine_gpus} / {best.engine_rate:,.0f}) = {best.pooled:,.0f} tokens/s; the split's ideal = the "
        f"slower side = {best.split:,.0f}. {best.trainer_rate:,.0f} tokens/s is the best arrangement's trained tokens "
        f"over its seconds in train(), {best.engine_rate:,.0f} {_full(results)}. ± is half of the 95 % confidence "
        f"interval, over repeats if there are {ENOUGH_REPEATS}, else over steps. Idle: share of the time outside the "
        "union of train() calls, and of requests in flight less pauses. Slots filled: requests in flight over slots. "
        f"Held: tokens held at the end minus at the start; beyond {STEADY:.0%} of the trained ones (!) the rate cannot "
        "be sustained: measure for longer. A * marks a run that ended early. Times sync: over the better one of "
        f"{' and '.join(BASES)}; in the latter all {setup.gpus} GPUs train and generate alternately. It does not count "
        "for the two rates of the ideal unless nothing else was measured."
    )


def best_sync(found: Mapping[str, Figures]) -> Figures | None:
    """The fastest synchronous arrangement that was measured; None if there is none."""
    return max((found[name] for name in BASES if name in found), key=lambda each: each.rate.mean, default=None)


def picture(results: Results) -> str:
    """The picture as SVG text."""
    found = results.figures
    height = _TOP + _ROW * len(found) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        text(16, 24, title(results.setup), size=13),
        *(_bars(found, results.ideal) if found else [text(16, 60, "no measured step")]),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _full(results: Results) -> str:
    """The source of the engines' rate."""
    if results.full_rates and max(results.full_rates) >= results.ideal.engine_rate:
        return "what the engines generate with every slot taken and without training"
    which = f"the best S >= {FULL_FROM}'s" if any(r.staleness >= FULL_FROM for r in results.runs) else "the best's"
    return f"{which} generated tokens over the seconds in which engines had requests and were not paused"


def _cells(each: Figures, found: Mapping[str, Figures], best: Ideal) -> tuple[str, ...]:
    thrown = each.tokens.masked + each.tokens.filtered + each.tokens.stale + each.tokens.failed
    return (
        each.arrangement + ("" if each.is_complete else " *"),
        f"{each.num_steps}" + (f" in {each.num_runs}" if each.num_runs > 1 else ""),
        f"{each.rate.mean:,.0f}",
        _half(each.rate),
        _times(each, best_sync(found)),
        _times(each, found.get(COLLECTING)),
        "" if each.is_colocated else f"{each.rate.mean / best.split:.2f}",
        f"{each.rate.mean / best.pooled:.2f}",
        f"{each.step_s.mean:.3g}",
        _half(each.step_s),
        *(f"{share:.0%}" for share in (each.trainer_idle, each.engines_idle, each.slots_filled)),
        f"{each.lag_mean:.2f}/{each.lag_max}",
        f"{1000 * each.pause_median_s:.0f}/{1000 * each.pause_max_s:.0f}",
        *(f"{tokens:,}" for tokens in (each.tokens.generated, each.tokens.trained, thrown)),
        f"{each.tokens.held:,}" + " !" * (abs(each.tokens.held) > STEADY * each.tokens.trained),
        f"{each.aborted}",
        "" if each.logprob_diff is None else f"{each.logprob_diff:.1e}",
    )


def _times(each: Figures, base: Figures | None) -> str:
    return f"{each.rate.mean / base.rate.mean:.2f}" if base else ""


def _half(value: Spread) -> str:
    return "" if isinf(value.share) else f"{value.share:.0%}"


def _bars(found: Mapping[str, Figures], best: Ideal) -> Iterator[str]:
    base = best_sync(found) or next(iter(found.values()))
    longest = max(best.pooled, *(each.rate.mean for each in found.values())) / base.rate.mean
    unit, right = _BAR / longest, _LEFT + _BAR + 150
    yield text(_LEFT, 56, f"trained tokens/s over {base.arrangement} ({base.rate.mean:,.0f})")
    for place, (colour, words) in enumerate(
        ((_TRAINER, "trainer idle"), (_ENGINES, "engines idle"), (_SLOTS, "slots empty"))
    ):
        yield rect(right + 105 * place, 46, 10, 10, colour)
        yield text(right + 105 * place + 14, 56, words)
    for place, each in enumerate(found.values()):
        y, times = _TOP + _ROW * place, each.rate.mean / base.rate.mean
        yield text(_LEFT - 8, y + 24, each.arrangement, anchor="end", size=14)
        yield rect(_LEFT, y + 6, unit * times, 28, _COLOURS.get(each.arrangement, _OURS))
        yield text(_LEFT + unit * times + 6, y + 24, f"{times:.2f}")
        shares = ((_TRAINER, each.trainer_idle), (_ENGINES, each.engines_idle), (_SLOTS, 1 - each.slots_filled))
        for row, (colour, share) in enumerate(shares):
            yield rect(right, y + 2 + 13 * row, _SHARES * share, 11, colour)
            yield text(right + _SHARES * share + 4, y + 12 + 13 * row, f"{share:.0%}", size=10)
    bottom = _TOP + _ROW * len(found)
    for words, rate in (("ideal", best.pooled), ("this split's", best.split)):
        x = _LEFT + unit * rate / base.rate.mean
        if x <= _LEFT + _BAR + 1:
            yield f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#999999" stroke-dasharray="4 3"/>'
            yield text(x, bottom + (14 if words == "ideal" else 28), words, anchor="middle", size=11)
