"""Curves of several arms as an SVG: each run thin, the mean of an arm thick."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 50, 20, 40, 40
COLOURS = ("#1f6fb4", "#c4561e", "#3a8f3a", "#7a4fa3")
SMOOTHED = 5
"""Number of steps over which a panel of rewards is averaged."""

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """The curves of runs that differ in their seeds alone."""

    name: str
    curves: Sequence[Curve]

    @property
    def mean(self) -> Curve:
        """The mean at the steps that all curves have."""
        values = [dict(curve) for curve in self.curves]
        shared = sorted(set.intersection(*map(set, values)))
        return [(step, fmean(each[step] for each in values)) for step in shared]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One diagram with values between 0 and 1."""

    title: str
    arms: Sequence[Arm]


def smoothed(curve: Curve) -> Curve:
    """Return the mean of each value with those of the steps before it."""
    return [
        (step, fmean(value for _, value in curve[max(0, place + 1 - SMOOTHED) : place + 1]))
        for place, (step, _) in enumerate(curve)
    ]


def picture(panels: Sequence[Panel]) -> str:
    """Draw the panels below each other."""
    size = f'viewBox="0 0 {WIDTH} {HEIGHT * len(panels)}" font-family="sans-serif"'
    pieces = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', '<rect width="100%" height="100%" fill="white"/>']
    for place, panel in enumerate(panels):
        pieces += [f'<g transform="translate(0 {HEIGHT * place})">', *_drawn(panel), "</g>"]
    return "\n".join([*pieces, "</svg>"]) + "\n"


def _drawn(panel: Panel) -> list[str]:
    last = max(step for arm in panel.arms for curve in arm.curves for step, _ in curve)
    pieces = [_grid(share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    pieces += [_text(_x(step, last), HEIGHT - BOTTOM + 16, f"{step:g}", "middle") for step in (0, last / 2, last)]
    pieces.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "training steps", "middle"))
    pieces.append(_text(LEFT, 18, panel.title, "start"))
    names = "".join(
        f'<tspan fill="{colour}" dx="12">{escape(arm.name)}</tspan>'
        for arm, colour in zip(panel.arms, COLOURS, strict=False)
    )
    pieces.append(f'<text x="{WIDTH - RIGHT}" y="18" font-size="12" text-anchor="end">{names}</text>')
    for arm, colour in zip(panel.arms, COLOURS, strict=False):
        pieces += [_line(curve, last, colour, 'stroke-width="1" opacity="0.4"') for curve in arm.curves]
        pieces.append(_line(arm.mean, last, colour, 'stroke-width="3"'))
    return pieces


def _grid(share: float) -> str:
    rule = f'<path d="M{LEFT} {_y(share):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
    return rule + _text(LEFT - 6, _y(share) + 4, f"{share:g}", "end")


def _x(step: float, last: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / last


def _y(share: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)


def _line(curve: Curve, last: float, colour: str, style: str) -> str:
    places = " ".join(f"{_x(step, last):.1f},{_y(value):.1f}" for step, value in curve)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" {style}/>'


def _text(x: float, y: float, words: str, anchor: str, colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'
