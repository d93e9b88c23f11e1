"""Compare the training of runs, step by step.

    python examples/replay/compare.py runs/first runs/again runs/other

Prints the loss and the gradient norm of each run in full, so that equal numbers are equal bit by bit.
"""

import json
import sys
from pathlib import Path

NUMBERS = ("train/loss", "train/grad_norm")


def main() -> None:
    runs = [rows(Path(folder)) for folder in sys.argv[1:]]
    for steps in zip(*runs, strict=False):
        numbers = [[row.get(name) for name in NUMBERS] for row in steps]  # a skipped step has none
        same = all(each == numbers[0] for each in numbers[1:])
        shown = "   ".join(f"{loss!r} {norm!r}" for loss, norm in numbers)
        sys.stdout.write(f"{steps[0]['step']}   {shown}   {'equal' if same else 'different'}\n")


def rows(folder: Path) -> list[dict[str, float]]:
    """Return the numbers of each step of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
