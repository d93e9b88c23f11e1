"""Messages behind a turn continue its tokens as the chat template would render them."""

from typing import Any

import pytest

from asyncrl.rollouts.chat import continuation_ids, conversation_ids
from tests.unit.rollouts.chat_templates import CHATML, GLM, QWEN3, TemplateTokenizer

TOOL = {"role": "tool", "content": "5"}
USER = {"role": "user", "content": "And then?"}


def continued(template: str, written: str, *messages: dict[str, Any], **variables: Any) -> str:
    """The text behind a turn of the model that ended with ``written``."""
    words = TemplateTokenizer(template)
    return words.decode(tuple(continuation_ids(words, words.encode(written), messages, None, variables)))


@pytest.mark.parametrize("template", [CHATML, QWEN3])
@pytest.mark.parametrize(
    ("written", "end"),
    [("2 + 3<|im_end|>", ""), ("2 + 3", "<|im_end|>"), ("2 + 3<|im_end|>\n", None)],
    ids=["ended by the model", "cut", "ended with its line"],
)
def test_a_turn_is_ended_once(template: str, written: str, end: str | None) -> None:
    start = "" if end is None else f"{end}\n"
    assert (
        continued(template, written, USER) == f"{start}<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tool_messages_share_a_turn_where_the_template_joins_them() -> None:
    text = continued(CHATML, "x<|im_end|>", TOOL, TOOL)
    each = "<tool_response>\n5\n</tool_response>"
    assert text == f"\n<|im_start|>user{each}{each}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("written", "message", "text"),
    [
        ("x<|observation|>", TOOL, "\n<tool_response>5</tool_response><|assistant|>\n"),
        ("x<|user|>", USER, "\nAnd then?<|assistant|>\n"),
        ("x", TOOL, "<|observation|>\n<tool_response>5</tool_response><|assistant|>\n"),
        ("x<|user|>", TOOL, "<|observation|>\n<tool_response>5</tool_response><|assistant|>\n"),
    ],
)
def test_where_the_next_role_ends_a_turn_the_model_may_have_written_it(
    written: str, message: dict[str, Any], text: str
) -> None:
    assert continued(GLM, written, message) == text


def test_thinking_that_the_template_drops_stays_in_the_record() -> None:
    written = "<think>hm</think>2 + 3<|im_end|>"
    assert continued(QWEN3, written, USER).startswith("\n<|im_start|>user")


def test_template_variables_reach_the_start_of_the_next_turn() -> None:
    assert continued(QWEN3, "x<|im_end|>", USER, enable_thinking=False).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize("template", [CHATML, QWEN3, GLM])
def test_a_continued_chat_equals_the_whole_chat_rendered_at_once(template: str) -> None:
    words = TemplateTokenizer(template)
    first, answer, then = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, USER
    before = conversation_ids(words, [first], None, {})
    think = words.encode("<think></think>\n") if template is GLM else []
    written = [*before, *think, *words.encode("Hello")]
    whole = conversation_ids(words, [first, answer, then], None, {})
    assert [*written, *continuation_ids(words, written, [then], None, {})] == whole


def test_a_template_without_the_turn_before_is_refused() -> None:
    with pytest.raises(ValueError, match="the chat template leaves out the answer"):
        continued("{{ messages[-1].content }}", "x", USER)
