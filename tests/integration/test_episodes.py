"""User functions generate the samples: real processes of user code, SGLang, Ray and Megatron on a CPU."""

import re
from pathlib import Path

import orjson
import pytest

from tests.integration.launcher import FATES, QUICKSTART, run

TWO_TURNS = "tests/integration/episodes/two_turns.py"
SMALL = ("--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--eval-interval", "2")

pytestmark = pytest.mark.timeout(1800)


def test_a_native_episode_of_two_turns_trains_and_is_evaluated(tmp_path: Path) -> None:
    flags = ("--custom-generate-function-path", TWO_TURNS, "--custom-rm-path", f"{TWO_TURNS}:reward")
    outcome = run(tmp_path / "run", *QUICKSTART, *SMALL, *flags, "--max-turns", "2")
    assert outcome.code == 0, outcome.output
    assert [row["step"] for row in outcome.rows] == [0, 1]
    for row in outcome.rows:
        assert row["tokens/generated"] == sum(row[f"tokens/{fate}"] for fate in FATES)
        assert row["lag/max"] <= 1
    assert max(row.get("train/logprob_diff", 0.0) for row in outcome.rows) < 1e-4
    assert "eval/accuracy" in outcome.rows[0]
    assert outcome.rows[-1]["eval/failed"] == 0
    assert (outcome.run_dir / "logs" / "user-code-0.log").exists()
    assert outcome.left == ()
    turns = {event["name"] for event in orjson.loads((outcome.run_dir / "timeline.json").read_bytes())}
    assert any(re.search(r"g\d+\.\d+", name) for name in turns)
