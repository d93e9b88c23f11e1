import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.data import load_tokenizer
from asyncrl.errors import DataError
from tests.unit.data.tokenizers_for_tests import TEMPLATE, tokenizer, tokenizer_folder


def test_text_to_tokens_and_back(tmp_path: Path) -> None:
    words = tokenizer(tmp_path)
    assert words.encode("one two three") == [1, 2, 3]
    assert words.encode_all(["one", "two three"]) == [[1], [2, 3]]
    assert words.decode((1, 2, 0)) == "one two <end>"
    assert load_tokenizer(tmp_path, skip_special_tokens=True).decode((1, 2, 0)) == "one two"


def test_chats_are_rendered_up_to_the_answer(tmp_path: Path) -> None:
    words = tokenizer(tmp_path, TEMPLATE)
    text = words.render([{"role": "user", "content": "one"}])
    assert text == "user : one <end> assistant :"
    assert words.encode(text) == [4, 6, 1, 0, 5, 6]


def test_a_template_file_goes_before_the_settings(tmp_path: Path) -> None:
    tokenizer_folder(tmp_path, TEMPLATE)
    (tmp_path / "chat_template.jinja").write_text("{{ messages | tojson }}")
    assert load_tokenizer(tmp_path).render([{"content": "<ä>"}]) == '[{"content": "<ä>"}]'


def test_templates_may_ask_for_tools_and_mark_the_answer(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ tools is none }}"
    )
    assert tokenizer(tmp_path, template).render([{"content": "one"}]) == "oneTrue"


def test_the_filter_of_json_has_the_arguments_of_transformers(tmp_path: Path) -> None:
    template = "{{ messages | tojson(separators=(',', ':'), sort_keys=True) }}"
    assert tokenizer(tmp_path, template).render([{"b": "one", "a": 2}]) == '[{"a":2,"b":"one"}]'


@pytest.mark.parametrize("is_file", [False, True])
def test_chats_with_tools_have_another_template_if_there_is_one(tmp_path: Path, is_file: bool) -> None:
    tokenizer_folder(tmp_path, "plain")
    if is_file:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].name }}")
    else:
        named = [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "{{ tools[0].name }}"},
        ]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    words = load_tokenizer(tmp_path).skipping(skip_special_tokens=True)
    assert words.render([]) == "plain"
    assert words.render([], [{"name": "run"}]) == "run"


@pytest.mark.parametrize(
    ("template", "message", "line"),
    [
        (None, {}, "apply-chat-template: the checkpoint has no chat template"),
        (TEMPLATE, {"role": "system"}, "the chat template refuses the messages: no system"),
        (
            "{{ messages[0].content.x.y }}",
            {"content": "a"},
            "the chat template refuses the messages: 'str object' has no",
        ),
        (
            "{{ '{} {}'.format(messages[0].content) }}",
            {"content": "a"},
            "the chat template refuses the messages: tuple index out of range",
        ),
        (
            "{{ messages[0].content|dictsort }}",
            {"content": "a"},
            "the chat template refuses the messages: 'str' object has no attribute 'items'",
        ),
    ],
)
def test_a_chat_that_cannot_be_rendered_is_refused(
    tmp_path: Path, template: str | None, message: dict[str, str], line: str
) -> None:
    with pytest.raises(DataError, match=line):
        tokenizer(tmp_path, template).render([message])


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer.json: no such file; save_pretrained\(\)"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="the chat template does not compile"):
        tokenizer(tmp_path, "{% if %}")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json: not JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer.json: not a tokenizer"):
        load_tokenizer(tmp_path)


def test_loading_imports_no_torch(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, TEMPLATE)
    code = (
        "import asyncrl.data, pathlib, sys; words = asyncrl.data.load_tokenizer(pathlib.Path(sys.argv[1]));"
        "words.render([{'role': 'user', 'content': 'a'}]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "False\n"
