"""A sink of a run's rows that applies the rules to each step, and logs each new alarm once."""

import logging
import math
from collections.abc import Iterable, Mapping

from asyncrl.alarms.rule import Rule
from asyncrl.alarms.rules import RULES
from asyncrl.alarms.watch import Watch

logger = logging.getLogger(__name__)

_LOGGED_ELSEWHERE = "length/alarm"
"""The pipeline logs the alarm of this number, with more of its evidence."""


class AlarmLog:
    """Logs alarms as warnings in words, each kind of alarm once in a run.  A step takes some 20 microseconds.

    A rule that fails ends the watch, and never the run.
    """

    def __init__(self, rules: Iterable[Rule] = RULES, *, update_interval: int = 1) -> None:
        """``update_interval`` is that of ``Watch``."""
        watched = [rule for rule in rules if _LOGGED_ELSEWHERE not in rule.needs]
        self._watch: Watch | None = Watch(watched, update_interval=update_interval)
        self._logged: set[str] = set()

    def write(self, row: Mapping[str, float | int], /) -> None:
        """Add one step; a row with an evaluation alone is no step."""
        if self._watch is None or "time/step_s" not in row:
            return
        numbers = {name: value for name, value in row.items() if math.isfinite(value)}
        try:
            raised = self._watch.add(int(row["step"]), numbers)
        except Exception as error:  # noqa: BLE001 (a bug of a rule must not end the run)
            logger.warning("alarms are not watched any more: %s: %s", type(error).__name__, error)
            self._watch = None
            return
        for alarm in raised:
            if alarm.title not in self._logged:
                self._logged.add(alarm.title)
                logger.warning("alarm at step %d: %s. %s", alarm.since, alarm.title, alarm.text)

    def close(self) -> None:
        """Do nothing; there is nothing to release."""
