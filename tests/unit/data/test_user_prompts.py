"""Prompts of a user's data source: chat messages are rendered with the run's variables of the template."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.compat import Sample, SlimeArgs
from asyncrl.compat.data_sources import SlimeSource
from asyncrl.data.user_prompts import tokeniser
from asyncrl.errors import HookFailed
from asyncrl.types import NewPrompt
from tests.unit.data.tokenizers_for_tests import tokenizer

TEMPLATE = "{{ messages[0].content }} {{ first or 'no' }} {{ second or 'no' }}"
MESSAGES = [{"role": "user", "content": "one"}]


def rendered(folder: Path, new: NewPrompt, variables: dict[str, Any]) -> str:
    made = tokeniser(tokenizer(folder, TEMPLATE), None, variables, is_stored=False)(new, 0)
    assert made is not None
    return made.text


@pytest.mark.parametrize(
    ("variables", "own", "text"),
    [
        ({}, {}, "one no no"),
        ({"first": 1}, {}, "one 1 no"),
        ({"first": 1}, {"second": 2}, "one 1 2"),
        ({"first": 1, "second": 1}, {"second": 2}, "one 1 2"),
    ],
)
def test_messages_are_rendered_with_the_variables_of_the_run_and_of_the_prompt(
    tmp_path: Path, variables: dict[str, Any], own: dict[str, Any], text: str
) -> None:
    assert rendered(tmp_path, NewPrompt(prompt=MESSAGES, template_variables=own), variables) == text
    sample = Sample(prompt=MESSAGES, apply_chat_template_kwargs=own)

    class Gives:
        def get_samples(self, num_samples: int) -> list[list[Sample]]:
            return [[sample]]

    (new,) = SlimeSource(Gives(), SlimeArgs(n_samples_per_prompt=1)).fetch(1, 0)
    assert rendered(tmp_path, new, variables) == text


def test_messages_are_rendered_with_the_tools_of_the_metadata_and_kept(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "run"}}]
    words = tokenizer(tmp_path, "{{ messages[0].content }} {{ tools[0].function.name }}")
    made = tokeniser(words, None, {}, is_stored=True)(NewPrompt(prompt=MESSAGES, metadata={"tools": tools}), 0)
    assert made is not None
    assert made.text == "one run"
    assert made.messages == tuple(MESSAGES)


@pytest.mark.parametrize("given", [(1, 2), np.array([1, 2]), [np.int64(1), np.int64(2)]])
def test_token_ids_of_a_source_become_plain_integers(tmp_path: Path, given: Any) -> None:
    tokenise = tokeniser(tokenizer(tmp_path), None, {}, is_stored=False)
    made = tokenise(NewPrompt(prompt="one", token_ids=given), 0)
    assert made is not None
    assert made.token_ids == (1, 2)
    assert [type(each) for each in made.token_ids] == [int, int]


@pytest.mark.parametrize("none", [None, (), np.array([], dtype=np.int64)])
def test_a_prompt_without_token_ids_is_tokenised(tmp_path: Path, none: Any) -> None:
    tokenise = tokeniser(tokenizer(tmp_path), None, {}, is_stored=False)
    made = tokenise(NewPrompt(prompt="one", token_ids=none), 0)
    assert made is not None
    assert made.token_ids == (1,)


def test_token_ids_that_are_no_integers_are_named(tmp_path: Path) -> None:
    tokenise = tokeniser(tokenizer(tmp_path), None, {}, is_stored=False)
    line = "prompt 7: token_ids must be integers: 'float' object cannot be interpreted as an integer"
    with pytest.raises(HookFailed, match=f"^{line}$"):
        tokenise(NewPrompt(prompt="one", token_ids=(1.0,)), 7)  # type: ignore[arg-type]
