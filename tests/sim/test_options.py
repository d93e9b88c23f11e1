"""The command line of the simulator refuses numbers out of range."""

import pytest

from asyncrl.sim.search.options import parser, setting_from


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--gpus 1", "argument --gpus: must be at least 2, got 1"),
        ("--rollout-batch-size -3", "argument --rollout-batch-size: must be at least 1, got -3"),
        ("--slots 8 0", "argument --slots: must be at least 1, got 0"),
        ("--staleness 1 -3", "argument --staleness: must be at least 0, got -3"),
        ("--seeds some", "argument --seeds: must be at least 1, got some"),
    ],
)
def test_a_number_out_of_range_is_refused_in_one_line(
    words: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(words.split())
    assert line in capsys.readouterr().err


def test_the_buffer_counts_batches_as_in_a_run() -> None:
    words = ["--gpus", "4", "--rollout-batch-size", "32"]
    assert setting_from(parser().parse_args([*words, "--async-buffer-size", "2"]))[0].buffer_size == 64
    assert setting_from(parser().parse_args(words))[0].buffer_size is None
