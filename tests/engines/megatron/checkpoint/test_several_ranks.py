"""Saves of several ranks: one that fails on one rank fails on all, and a stage may have no experts."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engines.megatron.checkpoint.directory import latest
from tests.engines.megatron.checkpoint import dense_stage_process, two_ranks_process
from tests.engines.megatron.families import TINY, write_tiny
from tests.engines.megatron.tiny import free_port, write_checkpoint
from tests.forks import Fork
from tests.ports import free_ports

DEADLINE_S = 300
"""Limit for processes that import Megatron, which takes 10 to 50 s on two shared cores."""

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)


def results(fault: str, folder: Path) -> list[dict[str, Any]]:
    """Run two ranks, and return the result of each."""
    given = (free_port(), write_checkpoint(folder / "hf"), folder / "saved")
    return answers([(two_ranks_process.__name__, fault, rank, *given) for rank in range(2)])


def answers(commands: list[tuple[Any, ...]]) -> list[Any]:
    """Run the modules at once, and return the last line of each, which is JSON."""
    ranks = [Fork(*each, stdout=subprocess.PIPE) for each in commands]
    try:
        return [json.loads(each.communicate(timeout=DEADLINE_S)[0].splitlines()[-1]) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.communicate()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "saved").glob("iter_*"))


def test_saves_succeed_after_one_that_was_too_slow(tmp_path: Path) -> None:
    for each in results("stall", tmp_path):
        first, *others = each["errors"]
        assert "not written within 8 s" in first or "imed out" in first
        assert others == [None, None]
    assert names(tmp_path) == ["iter_0000002", "iter_0000003"]
    assert latest(tmp_path / "saved") == tmp_path / "saved" / "iter_0000003"


def test_a_save_without_host_memory_on_one_rank_fails_on_both_and_training_continues(tmp_path: Path) -> None:
    found = results("memory", tmp_path)
    for each in found:
        first, *others = each["errors"]
        assert "cannot be written: no copy in host memory: DefaultCPUAllocator" in first
        assert others == [None, None]
    assert found[0]["losses"] == found[1]["losses"]
    assert names(tmp_path) == ["iter_0000002", "iter_0000003"]


def test_a_stage_without_experts_is_saved_and_loaded_to_the_same_numbers(tmp_path: Path) -> None:
    tiny = TINY["deepseek-v3"]
    write_tiny(tmp_path / "hf", replace(tiny, config={**tiny.config, "num_hidden_layers": 3}))
    given = (*free_ports(2), tmp_path / "hf", tmp_path / "saved")
    for before, after in answers([(dense_stage_process.__name__, rank, *given) for rank in range(4)]):
        assert after == before
