"""Engine and trainer compute the same log-probs over the ids that top-p and top-k keep, with the real SGLang."""

from pathlib import Path

import pytest

from tests.integration.launcher import FATES, run

SYNCHRONOUS = ("--config", "configs/quickstart_moe.toml", "--max-staleness", "0", "--num-rollout", "3")


@pytest.mark.timeout(600)
def test_log_probs_of_engine_and_trainer_agree_over_the_kept_ids(tmp_path: Path) -> None:
    """Each limit alone is a test of the engine's columns; both at once keep other ids than either."""
    outcome = run(tmp_path / "run", *SYNCHRONOUS, "--rollout-top-p", "0.9", "--rollout-top-k", "20")
    assert outcome.code == 0, outcome.output
    assert len(outcome.rows) == 3
    for row in outcome.rows:
        assert row["lag/max"] == 0
        assert row["tokens/trained"] > 0
        assert row["mismatch/logprob_max"] < 1e-4  # every trained token; over the whole vocabulary, up to log 1 / 0.9
        assert row["tokens/generated"] == sum(row[f"tokens/{fate}"] for fate in FATES)
    assert "are not known" not in (outcome.run_dir / "run.log").read_text()
