"""Rounding errors are measured where a model rounds, and are zero elsewhere."""

import pytest

from benchmarks.rounding import __main__ as rounding


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_a_small_model_is_apart_by_little_but_something(capsys: pytest.CaptureFixture[str]) -> None:
    assert rounding.main(["--model", "tiny", "--tokens", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()[:3]
    assert [line.partition(":")[0] for line in lines] == [
        "float32 and bfloat16",
        "float32 and bfloat16, other attention",
        "bfloat16 and bfloat16, other attention",
    ]
    assert all(0.0 < float(line.rpartition(" ")[2]) < 0.01 for line in lines)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_fp8_is_coarser_and_so_is_fp8_for_activations(capsys: pytest.CaptureFixture[str]) -> None:
    assert rounding.main(["--model", "tiny", "--tokens", "64", "--fp8"]) == 0
    lines = capsys.readouterr().out.splitlines()[:3]
    assert [line.partition(":")[0] for line in lines] == [
        "float32 and weights in fp8",
        "float32 and weights and activations in fp8",
        "weights in fp8 and weights and activations in fp8",
    ]
    apart = [float(line.rpartition(" ")[2]) for line in lines]
    assert all(0.0005 < each < 0.05 for each in apart)
    assert apart[1] > max(apart[0], apart[2])
