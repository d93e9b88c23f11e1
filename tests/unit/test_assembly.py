"""What is refused before anything expensive starts, and what the servers are told."""

import json
from pathlib import Path

import pytest

from asyncrl.assembly import OVERRIDE_FLAG, check, server_flags
from asyncrl.config import RunConfig, load_run
from asyncrl.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"


def quickstart(*flags: str) -> RunConfig:
    return load_run(["--config", str(QUICKSTART), *flags])


def test_engines_hear_of_shape_flags_that_win() -> None:
    assert server_flags(quickstart("--num-layers", "2")) == quickstart().sglang
    flags = server_flags(quickstart("--norm-epsilon", "0.5"))
    assert flags == {**quickstart().sglang, OVERRIDE_FLAG: json.dumps({"rms_norm_eps": 0.5})}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--num-layers", "3"], "num-layers 3: config.json says 2, and the checkpoint's tensors have that size"),
        (
            ["--norm-epsilon", "0.5", f"--sglang-{OVERRIDE_FLAG}", "{}"],
            "--sglang-json-model-override-args with rms_norm_eps: leave one of them out",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(flags: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(quickstart(*flags))
    assert str(error.value) == line
