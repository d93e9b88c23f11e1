"""The targets of the comparison, and the figures in its table."""

from dataclasses import replace

from rich.console import Console

from asyncrl.sim.model.result import SimulationResult
from asyncrl.sim.search.policies import policies
from asyncrl.sim.search.search import SearchResult
from asyncrl.sim.search.table import checks, comparison
from asyncrl.sim.search.targets import verdicts
from tests.sim.settings import setting

MASKING = SimulationResult(
    trained_per_s=60.0,
    step_s=1.0,
    step_times_s=(1.0,),
    trainer_idle=0.0,
    engines_idle=0.0,
    slots_filled=1.0,
    lag_mean=1.0,
    lag_max=2,
    masked=0.25,
    filtered=0.0,
    stale=0.0,
    failed=0.0,
    recomputed=0.0,
)


def found(result: SimulationResult) -> dict[str, SearchResult]:
    policy = policies((), (2,), (1,))["mask S=2"]
    return {
        "mask S=2": SearchResult(policy=policy, setting=setting(2), outcome=result, trained_per_s=(60.0,), tried=())
    }


def shown(part: object) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(part)
    return captured.get()


def test_the_target_for_masking_counts_masked_tokens_and_shows_both_shares() -> None:
    judged = verdicts(found(MASKING), {}, ideal=88.0)
    assert [(round(verdict.value, 3), verdict.limit) for verdict in judged] == [
        (0.909, 0.9),
        (0.25, None),
        (0.682, None),
    ]
    assert all(verdict.holds for verdict in judged)
    rows = shown(checks(judged)).splitlines()
    assert [row for row in rows if "holds" in row and "all tokens of trained groups" in row and ">= 0.9" in row]
    assert [row for row in rows if "unmasked tokens alone" in row and "0.682" in row and ">=" not in row]
    assert not verdicts(found(replace(MASKING, masked=0.2)), {}, ideal=88.0)[0].holds


def test_the_table_shows_the_share_of_the_ideal_without_and_with_masked_tokens() -> None:
    (row,) = [row for row in shown(comparison(found(MASKING), 88.0, "")).splitlines() if "mask S=2" in row]
    assert [cell.strip() for cell in row.split("│")][9:11] == ["0.682", "0.909"]
    assert "25.0%" in row
