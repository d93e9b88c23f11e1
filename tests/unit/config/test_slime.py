"""What is said of flags that slime's users have in their scripts."""

import re
from pathlib import Path

import pytest

from asyncrl.config.flags import parser, read_flags
from asyncrl.config.slime import INSTEAD

PAGE = Path(__file__).parents[3] / "docs" / "slime.md"
OURS = {flag for action in parser()._actions for flag in action.option_strings}  # noqa: SLF001


def test_none_of_them_is_a_flag_here() -> None:
    assert not {f"--{name}" for name in INSTEAD} & OURS


def test_every_flag_that_is_there_instead_is_one() -> None:
    named = {flag for text in INSTEAD.values() for flag in re.findall(r"--[a-z0-9-]+", text)}
    assert named <= OURS


def test_the_page_says_the_same() -> None:
    told = {
        flag: text
        for flags, text in re.findall(
            r"^\| (`--.*`) \| (.*) \|$", PAGE.read_text().partition("| here |\n|---|---|\n")[2], re.MULTILINE
        )
        for flag in re.findall(r"`--([a-z0-9-]+)`", flags)
    }
    assert told == dict(INSTEAD)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--swiglu"],
            "unknown flag --swiglu (of slime or Megatron); not needed: read from the model's config.json",
        ),
        (["--offload-train"], "unknown flag --offload-train (of slime or Megatron); use --colocate"),
        (
            ["--num-epoch", "3"],
            "unknown flag --num-epoch (of slime or Megatron); use --num-rollout, which counts training",
        ),
    ],
)
def test_the_line_says_what_there_is_instead(words: list[str], line: str) -> None:
    (mistake,) = read_flags(words)[1].mistakes
    assert mistake.startswith(line)
