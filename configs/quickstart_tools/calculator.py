"""The episode of the quickstart with a tool: the model may call a calculator before it answers."""

import re

from asyncrl.rollouts.native import Episode
from asyncrl.rollouts.tools.loop import run_tools

MOST_TURNS = 4
"""Two calls, the answer, and one turn to spare."""


async def episode(ep: Episode) -> None:
    """Answer one problem.  The reward is 1.0 if the last turn is the label and nothing else."""
    ep.reward = 0.0
    turn = await run_tools(ep, {"calculator": calculator}, max_turns=MOST_TURNS)
    ep.reward = float(turn.text.removesuffix("<end>") == ep.label)


def calculator(expression: str) -> str:
    """Compute one product or one sum of two whole numbers.  Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d{1,9})([*+])(\d{1,9})", expression)
    if found is None:
        raise ValueError("one operation, like 12*34 or 1234+56")
    first, second = int(found[1]), int(found[3])
    return str(first * second if found[2] == "*" else first + second)
