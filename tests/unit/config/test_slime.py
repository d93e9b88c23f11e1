"""The errors for flags that slime's users have in their scripts."""

import re
from pathlib import Path

import pytest

from asyncrl.config.command_line import parser, read_flags
from asyncrl.config.slime_flags import INSTEAD

PAGE = Path(__file__).parents[3] / "docs" / "slime.md"
OURS = {flag for action in parser()._actions for flag in action.option_strings}  # noqa: SLF001


def test_flags_of_slime_without_an_equivalent_are_not_flags() -> None:
    assert not {f"--{name}" for name in INSTEAD} & OURS


def test_every_replacement_of_a_slime_flag_is_a_flag() -> None:
    named = {flag for text in INSTEAD.values() for flag in re.findall(r"--[a-z0-9-]+", text)}
    assert named <= OURS


def test_the_docs_list_the_same_flags_of_slime() -> None:
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
def test_the_error_for_a_flag_of_slime_names_its_replacement(words: list[str], line: str) -> None:
    (mistake,) = read_flags(words)[1].mistakes
    assert mistake.startswith(line)
