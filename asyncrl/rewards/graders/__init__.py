"""The built-in graders, by the name that ``--rm-type`` or a row's ``rm_type`` gives them.

A grader is a plain function ``(response, label, metadata) -> number or dict of numbers and texts``.
"""

from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.rewards.graders.chance import coin
from asyncrl.rewards.graders.dapo import answer_line
from asyncrl.rewards.graders.exact import same_text
from asyncrl.rewards.graders.f1 import word_f1
from asyncrl.rewards.graders.gpqa import option
from asyncrl.rewards.graders.ifeval import follows_all
from asyncrl.rewards.graders.math import after_thinking, boxed_equals
from asyncrl.rewards.graders.number import same_number

Grader = Callable[[str, Any, Mapping[str, Any]], "float | dict[str, Any]"]

GRADERS: Mapping[str, Grader] = {
    "number": same_number,
    "exact": same_text,
    "math": boxed_equals,
    "deepscaler": after_thinking,
    "dapo": answer_line,
    "f1": word_f1,
    "gpqa": option,
    "ifeval": follows_all,
    "random": coin,
}
"""The graders that need no service."""

__all__ = ["GRADERS", "Grader", "same_number", "same_text"]
