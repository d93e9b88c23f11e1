import re
from dataclasses import replace
from pathlib import Path

from asyncrl.metrics.facts import TokenCounts
from asyncrl.metrics.names import METRICS
from asyncrl.metrics.reporter import row
from tests.declared_metrics import is_declared
from tests.unit.metrics.made import UPDATE, evaluation, facts, with_episodes, with_routes

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"
FULL_FACTS = with_episodes(facts(update=UPDATE, evaluated=evaluation(4, gsm=0.5, hard=0.25), logprob_diff=0.01))
OF_LOG_FUNCTIONS = {"log_function/errors": 0, "log_function/skipped": 0}
FULL_ROW = row(replace(with_routes(FULL_FACTS), checkpoint_s=0.1, hooks_s=0.1), TokenCounts()) | OF_LOG_FUNCTIONS


def test_the_docs_list_every_metric_with_its_unit_and_meaning() -> None:
    text = DOCS.read_text()
    missing = [m.name for m in METRICS if f"| `{m.name}` | {m.unit or '-'} | {m.meaning} |" not in text]
    assert missing == []


def test_the_docs_speak_of_no_metric_that_does_not_exist() -> None:
    families = {metric.name.partition("/")[0] for metric in METRICS if "/" in metric.name}
    named = re.findall(r"`(\w+/[\w/]+)`", DOCS.read_text())
    assert [name for name in named if name.partition("/")[0] in families and not is_declared(name)] == []


def test_no_name_is_declared_twice() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))


def test_every_number_of_a_row_is_declared() -> None:
    assert [name for name in FULL_ROW if not is_declared(name)] == []


def test_every_declared_metric_occurs_in_a_row_that_has_everything() -> None:
    fixed = {metric.name for metric in METRICS if not re.search(r"[A-Z]{2,}", metric.name)}
    assert fixed - set(FULL_ROW) == set()


def test_a_misspelt_name_is_not_declared() -> None:
    assert is_declared("filter/too long")
    assert not is_declared("lag/maxi")
    assert not is_declared("reward")
