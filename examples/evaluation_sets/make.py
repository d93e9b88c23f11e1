"""Split the quickstart's held-out problems by the number of steps that their answers need.

    uv run examples/evaluation_sets/make.py

Writes ``short.jsonl`` (the second number is at most 3) and ``long.jsonl`` (at least 6) next to this file.
"""

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
HELDOUT = HERE.parents[1] / "configs" / "quickstart" / "heldout.jsonl"
SHORT, LONG = range(1, 4), range(6, 10)


def main() -> None:
    lines = HELDOUT.read_text().splitlines(keepends=True)
    for name, steps in (("short", SHORT), ("long", LONG)):
        (HERE / f"{name}.jsonl").write_text("".join(line for line in lines if num_steps(line) in steps))


def num_steps(line: str) -> int:
    """Return the second number of a problem such as ``347+3=``: one step of the answer carries one over."""
    return int(json.loads(line)["prompt"].rstrip("=").partition("+")[2])


if __name__ == "__main__":
    main()
