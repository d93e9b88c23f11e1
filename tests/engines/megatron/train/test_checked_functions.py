"""A user's functions are checked before anything expensive starts.

The tests are here because the check imports Megatron.
"""

from pathlib import Path

import pytest

from asyncrl.app.checks import check
from asyncrl.config import RunConfig, load_run
from asyncrl.errors import PluginError

QUICKSTART = Path(__file__).parents[4] / "configs" / "quickstart.toml"


def quickstart(*flags: str) -> RunConfig:
    return load_run(["--config", str(QUICKSTART), *flags])


def test_a_custom_loss_is_found_and_tried(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text("def loss(p, old, advantages, mask, lengths): return p.sum(), {}")
    with pytest.raises(PluginError, match=r"losses.py:los': .* has no function 'los'; it has: loss"):
        check(quickstart("--custom-loss-function-path", f"{tmp_path}/losses.py:los"))
    with pytest.raises(PluginError, match=r"tried on made-up numbers: loss function loss: losses have the shape \(\)"):
        check(quickstart("--custom-loss-function-path", f"{tmp_path}/losses.py:loss"))


def test_a_custom_advantage_is_found(tmp_path: Path) -> None:
    (tmp_path / "advantages.py").write_text("def two(a, b): ...")
    with pytest.raises(PluginError, match=r"must take \(samples\) or slime's \(args, rollout_data, \*\*kwargs\)"):
        check(quickstart("--custom-advantage-function-path", f"{tmp_path}/advantages.py:two"))
