import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import DataConfig
from asyncrl.data import EndlessPrompts, load_held_out, load_prompts
from asyncrl.errors import DataError
from asyncrl.types import Prompt
from tests.unit.data.tokenizers_for_tests import TEMPLATE, tokenizer


def written(folder: Path, *lines: str) -> DataConfig:
    path = folder / "train.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return DataConfig(prompt_data=(path,), input_key="question", label_key="answer")


def numbered(count: int) -> list[Prompt]:
    return [Prompt(row=row, epoch=0, text="", token_ids=(1,), label=None) for row in range(count)]


def row(question: str = '"one"', answer: str = '"1"') -> str:
    return f'{{"question": {question}, "answer": {answer}}}'


def test_rows_become_prompts_in_file_order(tmp_path: Path) -> None:
    data = written(tmp_path, "\ufeff" + row('"one two"', "42"), "", "  \r", row('"three"', "1.5") + "\r", "")
    source = load_prompts(data, tokenizer(tmp_path))
    first, second, again = (source.take() for _ in range(3))
    assert (first.row, first.epoch, first.text, first.token_ids, first.label) == (0, 0, "one two", (1, 2), 42)
    assert (second.row, second.token_ids, second.label) == (1, (3,), 1.5)
    assert again == replace(first, epoch=1)


def test_chats_and_plain_texts_are_rendered_with_the_template(tmp_path: Path) -> None:
    chat = '[{"role": "user", "content": "one"}]'
    data = replace(written(tmp_path, row(chat), row('"one"')), apply_chat_template=True)
    first, second = load_held_out(data.prompt_data[0], data, tokenizer(tmp_path, TEMPLATE))
    assert first.text == second.text == "user : one <end> assistant :"


def test_numbers_of_tasks_become_texts_where_they_are_taken(tmp_path: Path) -> None:
    data = written(tmp_path, row("3"), row("0"))
    taken = load_prompts(data, tokenizer(tmp_path), takes_numbers=True)
    assert [prompt.text for prompt in taken.rows] == ["3", "0"]
    held_out = load_held_out(data.prompt_data[0], data, tokenizer(tmp_path), takes_numbers=True)
    assert [prompt.text for prompt in held_out] == ["3", "0"]


def test_metadata_is_handed_on(tmp_path: Path) -> None:
    data = replace(written(tmp_path, '{"question": "one", "answer": "", "m": {"a": 1}}'), metadata_key="m")
    assert load_prompts(data, tokenizer(tmp_path)).take().metadata == {"a": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "one"', ":2: not JSON: unexpected end of data, column 19"),
        ("[1]", ":2: must be a JSON object, got a list; the file needs one object per line"),
        ('{"answer": "1"}', ':2: key "question" is missing; the row has: answer; --input-key names the key'),
        ("{}", ':2: key "question" is missing; the row has: nothing; --input-key names the key'),
        (
            '{"questions": "one", "answer": "1"}',
            ':2: key "question" is missing; the row has: questions, answer; did you mean --input-key questions?',
        ),
        ('{"question": "one"}', ':2: key "answer" is missing; the row has: question; --label-key names the key'),
        (row("3"), ':2: key "question" must be text or a list of messages, got a number'),
        (row("null"), ':2: key "question" must be text or a list of messages, got null'),
        (row("[]"), ':2: key "question" is empty'),
        (row('["hello"]'), ':2: key "question", message 0 must be an object with role and content'),
        (row('""'), ':2: key "question" is empty'),
        (row('" "'), ':2: key "question" has no tokens'),
    ],
)
def test_a_wrong_row_is_one_line_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    data = written(tmp_path, row(), line)
    with pytest.raises(DataError) as error:
        load_prompts(data, tokenizer(tmp_path))
    assert str(error.value) == f"{data.prompt_data[0]}{message}"


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("3", ':1: key "question" must be text or a list of messages, got a number'),
        ('["hello"]', ':1: key "question", message 0 must be an object with role and content'),
        ('[{"role": "user"}]', ':1: key "question", message 0 must be an object with role and content'),
        ('[{"role": "system", "content": ""}]', ":1: the chat template refuses the messages: no system"),
    ],
)
def test_a_wrong_chat_is_one_line_with_file_and_line(tmp_path: Path, question: str, message: str) -> None:
    data = replace(written(tmp_path, row(question)), apply_chat_template=True)
    with pytest.raises(DataError) as error:
        load_prompts(data, tokenizer(tmp_path, TEMPLATE))
    assert str(error.value) == f"{data.prompt_data[0]}{message}"


def test_other_faults_are_named(tmp_path: Path) -> None:
    words = tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"train.jsonl: the file has no rows"):
        load_prompts(written(tmp_path, "", " "), words)
    with pytest.raises(DataError, match=r"no.jsonl: no such file"):
        load_held_out(tmp_path / "no.jsonl", written(tmp_path), words)
    with pytest.raises(DataError, match=r"Is a directory"):
        load_held_out(tmp_path, written(tmp_path), words)
    data = replace(written(tmp_path, '{"question": "one", "answer": "", "m": 3}'), metadata_key="m")
    with pytest.raises(DataError, match=r':1: key "m" must be an object, got a number'):
        load_prompts(data, words)


def test_long_prompts_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = written(tmp_path, row('"one two three"'), row('"one"'), row('"one two"'))
    with caplog.at_level(logging.INFO):
        source = load_prompts(replace(data, rollout_max_prompt_len=2), tokenizer(tmp_path))
    assert [source.take().row for _ in range(2)] == [1, 2]
    assert caplog.messages == [f"{data.prompt_data[0]}: 2 prompts, 1 longer ones left out"]
    with pytest.raises(DataError, match="no prompt has at most rollout-max-prompt-len 2 tokens; the shortest has 3"):
        load_prompts(replace(written(tmp_path, row('"one two three"')), rollout_max_prompt_len=2), tokenizer(tmp_path))
    assert len(load_held_out(data.prompt_data[0], replace(data, rollout_max_prompt_len=1), tokenizer(tmp_path))) == 1


@settings(deadline=None, max_examples=60)
@given(count=st.integers(1, 30), seed=st.none() | st.integers(0, 2**31), start=st.integers(0, 100))
def test_every_epoch_visits_every_row_once_and_position_restores_the_order(
    count: int, seed: int | None, start: int
) -> None:
    source, other = EndlessPrompts(numbered(count), seed), EndlessPrompts(numbered(count), seed)
    taken = [source.take() for _ in range(4 * count)]
    for epoch in range(4):
        this = taken[epoch * count : (epoch + 1) * count]
        assert {prompt.epoch for prompt in this} == {epoch}
        assert sorted(prompt.row for prompt in this) == list(range(count))
    assert source.position == 4 * count
    position = start % len(taken)
    other.seek(position)
    assert [other.take() for _ in range(len(taken) - position)] == taken[position:]


def test_epochs_and_seeds_differ() -> None:
    one, two = EndlessPrompts(numbered(50), 1), EndlessPrompts(numbered(50), 2)
    first, second = [one.take().row for _ in range(50)], [one.take().row for _ in range(50)]
    assert first != second
    assert first != [two.take().row for _ in range(50)]


def test_a_prompt_is_found_by_epoch_and_row() -> None:
    source = EndlessPrompts(numbered(5)[2:], 7)
    taken = [source.take() for _ in range(6)]
    assert [source.at(prompt.epoch, prompt.row) for prompt in taken] == taken
    with pytest.raises(KeyError):
        source.at(0, 1)  # left out


def test_a_fingerprint_tells_prompts_and_their_order_apart() -> None:
    same, longer = numbered(3), [*numbered(2), replace(numbered(3)[2], token_ids=(1, 1))]
    sources = [EndlessPrompts(same, 1), EndlessPrompts(same, 2), EndlessPrompts(same, None)]
    sources += [EndlessPrompts(numbered(4), 1), EndlessPrompts(longer, 1), EndlessPrompts(same[1:], 1)]
    fingerprints = [source.fingerprint for source in sources]
    assert len(set(fingerprints)) == len(fingerprints)
    assert EndlessPrompts(numbered(3), 1).fingerprint == fingerprints[0]


def test_a_caller_s_mistakes_are_value_errors() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        EndlessPrompts([], None)
    with pytest.raises(ValueError, match="position must be at least 0, got -1"):
        EndlessPrompts(numbered(1), None).seek(-1)


def test_prompts_without_room_for_a_response_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = ("one", "one two three", "one two")
    data, words = written(tmp_path, *(row(f'"{text}"') for text in texts)), tokenizer(tmp_path)
    assert len(load_prompts(data, words)) == 3
    assert len(load_prompts(data, words, most_tokens=2)) == 2
    assert "1 prompts of more than 2 tokens do not fit with a response" in caplog.text
    limited = replace(data, rollout_max_prompt_len=1)
    assert len(load_prompts(limited, words, most_tokens=2)) == 1, "the flag's limit holds"
