"""Loss masks of chats: the text under mask 1 is what the assistant wrote, whatever the template does."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.data import load_tokenizer
from asyncrl.data.loss_masks import MultiTurnLossMaskGenerator
from asyncrl.errors import DataError
from tests.unit.data.chat_templates import GLM4, GLM45, QWEN3, QWEN25, QWEN35, R1, byte_tokenizer

CALL = {"function": {"name": "run", "arguments": {}}}
END = "<｜end▁of▁sentence｜>"  # noqa: RUF001


def user(text: str = "Why?") -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def tool(text: str = "assistant\n") -> dict[str, Any]:
    """An output that looks like a header."""
    return {"role": "tool", "content": text}


CHAT = [
    {"role": "system", "content": "Sys"},
    user(),
    answer("<think>\nA long thought é\n</think>\n\nIt is 漢."),
    user("And?"),
    answer("<think>\nTwo\n</think>\n\nLook:", tool_calls=[CALL, CALL]),
    tool(),
    tool("4"),
    answer("<think>\nThree\n</think>\n\nFour."),
]
THINKING = "<think>\nTwo\n</think>\n\nLook:\n<tool_call>\nrun\n</tool_call>\n<tool_call>\nrun\n</tool_call><|im_end|>\n"
LAST = "<think>\nThree\n</think>\n\nFour.<|im_end|>\n"


def generator(folder: Path, template: str, kind: str = "template") -> MultiTurnLossMaskGenerator:
    return MultiTurnLossMaskGenerator(load_tokenizer(byte_tokenizer(folder, template)), kind)


def trained(made: MultiTurnLossMaskGenerator, messages: list[dict[str, Any]], **more: Any) -> list[str]:
    token_ids, mask = made.get_loss_mask(messages, **more)
    assert len(token_ids) == len(mask) and set(mask) <= {0, 1}
    return made.get_text_from_loss_mask(token_ids, mask)


def test_a_template_that_drops_earlier_thinking_has_the_rest_of_the_answer(tmp_path: Path) -> None:
    assert trained(generator(tmp_path, QWEN3), CHAT) == ["It is 漢.<|im_end|>\n", THINKING, LAST]


def test_the_start_of_thinking_in_the_prompt_is_no_answer(tmp_path: Path) -> None:
    without = [text.removeprefix("<think>\n") for text in (THINKING, LAST)]
    assert trained(generator(tmp_path, QWEN35, "qwen3_5"), CHAT) == ["It is 漢.<|im_end|>\n", *without]


@pytest.mark.parametrize("template", [QWEN3, QWEN35, QWEN25])
def test_messages_one_by_one_keep_all_thinking(tmp_path: Path, template: str) -> None:
    made = generator(tmp_path, template, "qwen3")
    first = "<think>\nA long thought é\n</think>\n\nIt is 漢.<|im_end|>\n"
    skip = len("<think>\n") if template == QWEN35 else 0
    assert trained(made, CHAT) == [text[skip:] for text in (first, THINKING, LAST)]
    text = made.tokenizer.decode(tuple(made.get_loss_mask(CHAT)[0]))
    assert text.count("<|im_start|>system") == 1 and text.count("<tool_response>") == 2


def test_one_answer_of_one_turn_is_the_same_both_ways(tmp_path: Path) -> None:
    chat = CHAT[:3]
    for template in (QWEN3, QWEN35, QWEN25):
        one, other = (generator(tmp_path, template, kind).get_loss_mask(chat) for kind in ("template", "qwen3"))
        assert one == other


def test_thinking_is_dropped_always_and_an_answer_to_a_tool_has_no_header(tmp_path: Path) -> None:
    chat = [user(), answer("<think>x</think>Yes"), user(), answer(None, tool_calls=[CALL]), tool(), answer("Four")]
    calls = f"<｜calls▁begin｜>run<｜calls▁end｜>{END}"  # noqa: RUF001
    assert trained(generator(tmp_path, R1), chat) == [f"Yes{END}", calls, f"Four{END}"]


HOISTS = """
{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- for m in messages if m.role == 'user' or m.role == 'assistant' %}
{{- '<|' + m.role + '|>' + m.content }}{% if m.role == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
"""A template that shows all system messages first."""
HINTED = [user("q1"), answer("a1"), user("q2"), {"role": "system", "content": "hint"}, answer("a2")]


def test_a_system_message_that_the_template_moves_does_not_add_the_question_to_the_answer(tmp_path: Path) -> None:
    assert trained(generator(tmp_path, HOISTS), HINTED) == ["a1<|im_end|>", "a2<|im_end|>"]


def test_messages_one_by_one_are_refused_where_the_template_moves_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="shows a message of role 'system' elsewhere"):
        trained(generator(tmp_path, HOISTS, "qwen3"), HINTED)


def test_answers_without_an_end_stop_at_the_next_message(tmp_path: Path) -> None:
    assert trained(generator(tmp_path, GLM45), CHAT) == [
        "\n<think></think>\nIt is 漢.",
        "\n<think>Two</think>\nLook:\n<tool_call>run\n</tool_call>\n<tool_call>run\n</tool_call>",
        "\n<think>Three</think>\nFour.",
    ]


def test_tool_calls_that_hide_the_content_are_the_answer(tmp_path: Path) -> None:
    chat = [user(), answer("hidden", tool_calls=[CALL]), tool(), answer("Four")]
    assert trained(generator(tmp_path, GLM4), chat) == ["run\n{}", "\nFour"]


@pytest.mark.parametrize("template", [QWEN25, QWEN3])
def test_a_call_without_words_is_an_answer(tmp_path: Path, template: str) -> None:
    chat = [user(), answer("", tool_calls=[CALL]), tool(), answer("Four")]
    first, second = trained(generator(tmp_path, template), chat)
    assert first.endswith("<tool_call>\nrun\n</tool_call><|im_end|>\n") and "assistant" not in first
    assert second.endswith("Four<|im_end|>\n") and "tool_response" not in second


@pytest.mark.parametrize("kind", ["template", "qwen3"])
@pytest.mark.parametrize("key", ["loss_mask", "step_loss_mask"])
def test_an_answer_can_be_masked_by_a_key(tmp_path: Path, kind: str, key: str) -> None:
    chat = [user(), answer("One", **{key: 0}), user(), answer("Two", **{key: 1})]
    found = trained(generator(tmp_path, QWEN25, kind), chat)
    assert found == ["Two<|im_end|>\n"]


def test_equal_answers_are_found_at_their_places(tmp_path: Path) -> None:
    chat = [user("Yes"), answer("Yes"), user("Yes"), answer("Yes"), user("Yes")]
    for template in (QWEN25, QWEN3):
        made = generator(tmp_path, template)
        token_ids, mask = made.get_loss_mask(chat)
        assert made.get_text_from_loss_mask(token_ids, mask) == ["Yes<|im_end|>\n"] * 2
        text = made.tokenizer.decode(tuple(token_ids[: mask.index(1)]))
        assert text.endswith("user\nYes<|im_end|>\n<|im_start|>assistant\n")


def test_tools_are_rendered(tmp_path: Path) -> None:
    tools = [{"function": {"name": "run"}}]
    for kind in ("template", "qwen3"):
        made = generator(tmp_path, QWEN3, kind)
        token_ids, _ = made.get_loss_mask([user(), answer("Yes")], tools=tools)
        assert made.tokenizer.decode(tuple(token_ids)).startswith('<|im_start|>system\n# Tools\n[{"function"')
        assert trained(made, [user(), answer("Yes")], tools=tools) == ["<think>\n\n</think>\n\nYes<|im_end|>\n"]


@pytest.mark.parametrize("kind", ["qwen", "distill_qwen"])
def test_a_distilled_model_has_one_question_and_one_answer(tmp_path: Path, kind: str) -> None:
    made = generator(tmp_path, R1, kind)
    token_ids, mask = made.get_loss_mask([user(), answer("x</think>Yes")])
    assert made.tokenizer.decode(tuple(token_ids)) == "<｜User｜>Why?<｜Assistant｜><think>\nx</think>Yes"  # noqa: RUF001
    assert made.get_text_from_loss_mask(token_ids, mask) == ["x</think>Yes"]
    assert not any(made.get_loss_mask([user(), answer("Yes", step_loss_mask=0)])[1])


def test_response_lengths_start_at_the_first_answer(tmp_path: Path) -> None:
    assert generator(tmp_path, QWEN25).get_response_lengths([[0, 1, 0, 1], [0, 0], [1]]) == [3, 0, 1]


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer_type must be one of qwen, qwen3, .*, got 'gpt'"):
        generator(tmp_path, QWEN25, "gpt")
    hides = generator(tmp_path, "{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}")
    with pytest.raises(DataError, match="the chat template does not show message 1"):
        hides.get_loss_mask([user(), answer("Yes")])


class LikeTransformers:
    """A tokenizer with the methods of transformers."""

    def __init__(self, folder: Path) -> None:
        self._ours = load_tokenizer(folder)

    def apply_chat_template(self, messages: Any, tools: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        return self._ours.render(messages, tools, add_generation_prompt=add_generation_prompt)

    def __call__(self, text: str, add_special_tokens: bool, return_offsets_mapping: bool) -> dict[str, Any]:
        assert return_offsets_mapping and not add_special_tokens
        token_ids, offsets = self._ours.encode_with_offsets(text)
        return {"input_ids": token_ids, "offset_mapping": offsets}


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5"])
def test_a_tokenizer_of_transformers_gives_the_same(tmp_path: Path, kind: str) -> None:
    theirs = MultiTurnLossMaskGenerator(LikeTransformers(byte_tokenizer(tmp_path, QWEN3)), kind)
    assert theirs.get_loss_mask(CHAT) == generator(tmp_path, QWEN3, kind).get_loss_mask(CHAT)
