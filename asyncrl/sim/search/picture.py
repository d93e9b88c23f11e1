"""The comparison as an SVG picture: throughput of each policy on the same GPUs, and throughput over the split."""

from collections.abc import Iterator, Mapping, Sequence

from asyncrl.sim.search.search import SearchResult
from asyncrl.sim.search.svg import rect, text

_COLOURS = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7", "#9c755f")
"""Tableau 10 without its grey; most colour-blind readers can tell these colours apart too."""
_WIDTH, _ROW, _TOP, _LEFT, _BAR, _PLOT = 1160, 34, 64, 120, 420, 430


def picture(found: Mapping[str, SearchResult], ideal: float, title: str) -> str:
    """The picture as SVG text."""
    height = max(_TOP + _ROW * len(found) + 70, 420)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        text(16, 24, title, size=15),
        *_bars(found, ideal),
        *_lines(found, ideal, height),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _bars(found: Mapping[str, SearchResult], ideal: float) -> Iterator[str]:
    yield text(_LEFT, 48, "trained tokens/s as a share of the ideal (grey: masked); trainer idle, slots empty")
    for place, (name, each) in enumerate(found.items()):
        y, result = _TOP + _ROW * place, each.outcome
        share = result.trained_per_s / ideal
        whole = share / (1 - result.masked)
        yield text(_LEFT - 8, y + 17, name, anchor="end")
        yield rect(_LEFT, y + 4, _BAR * whole, 18, "#cccccc")
        yield rect(_LEFT, y + 4, _BAR * share, 18, _COLOURS[place % len(_COLOURS)])
        words = f"{share:.2f}   idle {result.trainer_idle:.0%}, empty {1 - result.slots_filled:.0%}"
        yield text(_LEFT + _BAR * whole + 6, y + 17, words)
    bottom = _TOP + _ROW * len(found)
    yield _line([(_LEFT + _BAR, _TOP), (_LEFT + _BAR, bottom)], "#999999", dash=True)
    yield text(_LEFT + _BAR, bottom + 16, "1 = ideal", anchor="middle")


def _lines(found: Mapping[str, SearchResult], ideal: float, height: int) -> Iterator[str]:
    left, top, bottom = _WIDTH - _PLOT - 30, _TOP, height - 60
    gpus = next(iter(found.values())).setting.gpus
    yield text(left, 48, "the same over the split, at the best N and k tried")
    yield _line([(left, top), (left, bottom), (left + _PLOT, bottom)], "#333333")
    for share in (0.25, 0.5, 0.75, 1.0):
        y = bottom - (bottom - top) * share
        yield _line([(left, y), (left + _PLOT, y)], "#dddddd")
        yield text(left - 6, y + 4, f"{share:g}", anchor="end")
    for rollout in range(1, gpus):
        if gpus <= 16 or rollout % (gpus // 8) == 0:
            yield text(left + _PLOT * rollout / gpus, bottom + 16, f"{rollout}", anchor="middle")
    yield text(left + _PLOT / 2, bottom + 36, f"rollout GPUs of {gpus}", anchor="middle")
    for place, each in enumerate(found.values()):
        points = [
            (left + _PLOT * rollout / gpus, bottom - (bottom - top) * rate / ideal) for rollout, rate in _by_split(each)
        ]
        colour = _COLOURS[place % len(_COLOURS)]
        yield _line(points, colour, width=2)
        for x, y in points:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'


def _by_split(each: SearchResult) -> list[tuple[int, float]]:
    best: dict[int, float] = {}
    for setting, result in each.tried:
        best[setting.rollout_gpus] = max(best.get(setting.rollout_gpus, 0.0), result.trained_per_s)
    return sorted(best.items())


def _line(points: Sequence[tuple[float, float]], colour: str, *, width: int = 1, dash: bool = False) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="4 3"' if dash else ""
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'
