"""The user's choice of groups, as conditions of SQL."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

SORTS: Mapping[str, str] = {
    "step": "step",
    "row": "prompt_row",
    "mean": "reward_mean",
    "lowest": "reward_min",
    "highest": "reward_max",
    "spread": "reward_std",
    "length": "length_mean",
    "longest": "length_max",
    "lag": "lag_max",
    "diff": "logprob_diff",
    "seconds": "seconds_max",
}
"""The column of ``groups`` that each name of a sort order stands for."""
SPREADS = ("with", "without")


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which groups are listed, and in which order.  None and empty texts choose all.

    Steps, row and spread are those of a group; the other values are those of a sample, and a group is chosen if at
    least one of its samples has all of them.
    """

    from_step: int | None = None
    to_step: int | None = None
    row: int | None = None
    spread: str = ""
    """``with`` chooses groups with different rewards, ``without`` those with equal ones."""
    min_reward: float | None = None
    max_reward: float | None = None
    min_lag: int | None = None
    max_lag: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    finish: str = ""
    text: str = ""
    """Text in prompt or response, in any case."""
    sort: str = "step"
    descending: bool = True

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "Filter":
        """Read the filter's form; entries that are no number of the right kind choose all."""
        found: dict[str, Any] = {}
        for each in fields(cls):
            given = query.get(each.name, "").strip()
            if each.type == int | None:
                found[each.name] = _int(given)
            elif each.type == float | None:
                found[each.name] = _float(given)
        found["finish"], found["text"] = query.get("finish", ""), query.get("text", "").strip()
        found["spread"] = query["spread"] if query.get("spread") in SPREADS else ""
        found["sort"] = query["sort"] if query.get("sort") in SORTS else "step"
        return cls(**found, descending=query.get("order") != "up")

    def query(self) -> dict[str, str]:
        """Return the entries of the form that differ from their default."""
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "descending"}
        entries = {name: str(value) for name, value in given.items() if value not in (None, "")}
        if self.sort == "step":
            del entries["sort"]
        return entries | ({} if self.descending else {"order": "up"})

    @property
    def chooses_samples(self) -> bool:
        """Whether a group may be listed although some of its samples are not chosen."""
        return self.of_samples()[0] != "true"

    def of_groups(self, row: str) -> tuple[str, dict[str, Any]]:
        """Return the condition of a group, with its parameters; ``row`` is the column with the row of its prompt."""
        parts = {"from_step": "step >= $from_step", "to_step": "step <= $to_step", "row": f"{row} = $row"}
        return self._all(parts)

    def of_samples(self) -> tuple[str, dict[str, Any]]:
        """Return the condition of a sample, with its parameters.  ``is_found`` tells that its whole text matches."""
        parts = {
            "min_reward": "reward >= $min_reward",
            "max_reward": "reward <= $max_reward",
            "min_lag": "lag >= $min_lag",
            "max_lag": "lag <= $max_lag",
            "min_tokens": "response_tokens >= $min_tokens",
            "max_tokens": "response_tokens <= $max_tokens",
            "finish": "finish = $finish",
            "text": "(is_found OR contains(lower(prompt), lower($text)) OR contains(lower(response), lower($text)))",
        }
        return self._all(parts)

    def _all(self, parts: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
        values = {name: getattr(self, name) for name in parts if getattr(self, name) not in (None, "")}
        return " AND ".join(parts[name] for name in values) or "true", values


def _int(given: str) -> int | None:
    try:
        return max(-(2**31), min(int(given), 2**31 - 1))
    except ValueError:
        return None


def _float(given: str) -> float | None:
    try:
        number = float(given)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
