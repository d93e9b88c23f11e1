"""The check of a metric's name against the declared ones."""

import re

from asyncrl.metrics.names import METRICS


def is_declared(name: str) -> bool:
    """Whether ``name`` is one of ``METRICS``, where capitals stand for any text."""
    return _DECLARED.fullmatch(name) is not None


_DECLARED = re.compile("|".join(re.sub(r"[A-Z]{2,}", ".+", re.escape(metric.name)) for metric in METRICS))
