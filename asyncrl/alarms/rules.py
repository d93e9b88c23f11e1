"""All rules."""

from asyncrl.alarms import answers, engines, learning
from asyncrl.alarms.rule import Rule

RULES: tuple[Rule, ...] = (*learning.RULES, *engines.RULES, *answers.RULES)
