"""Draw the curves of a run of the quickstart with a tool: held-out accuracy and calls per answer.

python configs/quickstart_tools/plot.py runs/quickstart_tools-.../metrics.jsonl curves.svg
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 320, 50, 50, 34, 40
ACCURACY, CALLS = "#1f6fb4", "#c4561e"
MOST_CALLS = 2.0

Point = tuple[float, float]


def main() -> int:
    source, target = map(Path, sys.argv[1:])
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    target.write_text(picture(accuracies(lines), calls_per_answer(lines)))
    return 0


def accuracies(lines: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Return held-out accuracy by training steps done."""
    return [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]


def calls_per_answer(lines: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Return calls of the calculator per answer of each training step: every turn but the last is one call."""
    return [(line["step"], line["turns/mean"] - 1) for line in lines if "turns/mean" in line]


def picture(accuracy: Sequence[Point], calls: Sequence[Point]) -> str:
    last = max(step for step, _ in [*accuracy, *calls, (1.0, 0.0)])
    pieces = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *(grid(share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)),
        *(text(x_of(step, last), HEIGHT - BOTTOM + 16, f"{step:g}", "middle") for step in (0, last / 2, last)),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "training steps", "middle"),
        text(LEFT, 18, "held-out accuracy", "start", ACCURACY),
        text(WIDTH - RIGHT, 18, "calculator calls per answer", "end", CALLS),
        line([(x_of(step, last), y_of(value)) for step, value in accuracy], ACCURACY, dots=True),
        line([(x_of(step, last), y_of(value / MOST_CALLS)) for step, value in calls], CALLS),
        "</svg>",
    ]
    return "\n".join(pieces) + "\n"


def grid(share: float) -> str:
    y = y_of(share)
    rule = f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
    left = text(LEFT - 6, y + 4, f"{share:g}", "end", ACCURACY)
    return rule + left + text(WIDTH - RIGHT + 6, y + 4, f"{share * MOST_CALLS:g}", "start", CALLS)


def x_of(step: float, last: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / last


def y_of(share: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)


def line(points: Sequence[Point], colour: str, *, dots: bool = False) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    drawn = f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>'
    circles = (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points if dots)
    return drawn + "".join(circles)


def text(x: float, y: float, words: str, anchor: str, colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


if __name__ == "__main__":
    sys.exit(main())
