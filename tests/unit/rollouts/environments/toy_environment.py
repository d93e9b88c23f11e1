"""A small environment of the package ``verifiers``: sums of two turns."""

from typing import Any

import verifiers as vf
from datasets import Dataset


def load_environment(size: int = 4) -> Any:
    """Return the environment, as packages of ``verifiers`` do."""
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    rows = [{"question": f"{number}+1=?", "answer": str(number + 1)} for number in range(size)]
    return Sums(
        dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:2]),
        rubric=vf.Rubric(funcs=[is_right]),
        max_turns=2,
    )


class Sums(vf.MultiTurnEnv):  # type: ignore[misc]  # the package is untyped
    """Asks twice; the second answer counts."""

    async def env_response(self, messages: Any, state: Any, **further: Any) -> Any:
        """Return the messages between two turns."""
        return [{"role": "user", "content": "Are you sure?"}]


def is_right(completion: Any, answer: str, **further: Any) -> float:
    """Return the reward."""
    return float(bool(completion) and completion[-1]["content"] == answer)
