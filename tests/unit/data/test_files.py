"""Formats of prompt files, slices, and several files."""

import datetime
import decimal
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import DataConfig
from asyncrl.data import load_held_out, load_prompts
from asyncrl.data.files import open_files
from asyncrl.data.making import Made, PromptMaker
from asyncrl.data.raw_rows import PromptFile, RawRow
from asyncrl.data.rows import HELD_OUT_KEYS, TRAINING_KEYS
from asyncrl.errors import DataError
from asyncrl.types import Prompt
from tests.unit.data.prompt_files import config, jsonl, numbered_rows, stream, take
from tests.unit.data.tokenizers_for_tests import TEMPLATE, tokenizer


def parquet(path: Path, rows: list[dict[str, Any]], *, group: int = 100) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
    return path


def labels(folder: Path, data: DataConfig) -> list[Any]:
    """The labels of an epoch, in file order."""
    source = load_prompts(data, tokenizer(folder, TEMPLATE))
    return [source.take().label for _ in range(len(source))]


def read_by_block(file: PromptFile) -> list[Any]:
    return [row.found["answer"] for block in range(file.num_blocks) for row in file.read(block)[0]]


SLICES = ["", "@[0:3]", "@[:3]", "@[4:]", "@[-3:]", "@[:-3]", "@[-5:-2]", "@[3:-3]", "@[:]", "@[90:200]", "@[-500:7]"]


@pytest.mark.parametrize("text", SLICES)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_slice_has_the_rows_of_a_python_slice(tmp_path: Path, kind: str, text: str) -> None:
    rows = numbered_rows(100)
    path = (jsonl if kind == "jsonl" else parquet)(tmp_path / f"a.{kind}", rows)
    wanted = eval(f"list(range(100)){text.removeprefix('@')}")
    assert labels(tmp_path, config(Path(f"{path}{text}"))) == wanted


@settings(deadline=None, max_examples=80)
@given(
    lines=st.lists(st.sampled_from(["", "  ", "x", "x" * 40_000, "x" * 90_000]), min_size=1, max_size=12),
    bounds=st.tuples(st.none() | st.integers(-6, 12), st.none() | st.integers(-6, 12)),
    ending=st.sampled_from(["\n", "\r\n"]),
    is_closed=st.booleans(),
)
def test_blocks_have_every_row_once_with_its_place_and_line(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[str],
    bounds: tuple[int | None, int | None],
    ending: str,
    is_closed: bool,
) -> None:
    texts = [f'{{"answer": {number}, "pad": "{line}"}}' if line.strip() else line for number, line in enumerate(lines)]
    path = tmp_path_factory.mktemp("blocks") / "a.jsonl"
    path.write_bytes((ending.join(texts) + ending * is_closed).encode())
    rows = [number for number, line in enumerate(lines) if line.strip()][slice(*bounds)]
    start, stop = ("" if bound is None else bound for bound in bounds)
    try:
        (file,) = open_files([Path(f"{path}@[{start}:{stop}]")], config(path, input_key="pad"))
    except DataError:
        assert not rows
        return
    assert read_by_block(file) == [row.found["answer"] for row in file.rows()] == rows
    for row in file.rows():
        assert row.line in (None, row.found["answer"] + 1)
        assert file.row_at(row.place).found == row.found
        assert any(each.place == row.place for each in file.read(file.block_of(row.place))[0])


@pytest.mark.parametrize("text", ["", "@[0:1]", "@[1:]", "@[-2:]", "@[-1:]", "@[:-1]"])
@pytest.mark.parametrize("first_line", ["", "  ", "\r", '{"answer": -1}'])
def test_a_byte_order_mark_makes_no_row(tmp_path: Path, first_line: str, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(f'\ufeff{first_line}\n{{"answer": 0}}\n{{"answer": 1}}\n'.encode())
    (file,) = open_files([Path(f"{path}{text}")], config(path))
    rows = [-1, 0, 1] if first_line.strip() else [0, 1]
    wanted = eval(f"{rows}{text.removeprefix('@')}")
    assert read_by_block(file) == [row.found["answer"] for row in file.rows()] == wanted


@pytest.mark.parametrize("group", [7, 256, 300, 5000])
def test_parquet_blocks_have_every_row_once_in_any_order(tmp_path: Path, group: int) -> None:
    path = parquet(tmp_path / "a.parquet", numbered_rows(1000), group=group)
    (file,) = open_files([Path(f"{path}@[5:990]")], config(path))
    assert read_by_block(file) == list(range(5, 990))
    blocks = [*range(0, file.num_blocks, 2), *range(1, file.num_blocks, 2)]
    assert sorted(row.place for block in blocks for row in file.read(block)[0]) == list(range(5, 990))
    assert [file.row_at(place).found["answer"] for place in (989, 5, 400)] == [989, 5, 400]
    assert [file.block_of(file.read(block)[0][0].place) for block in blocks] == blocks
    with pytest.raises(KeyError):
        file.row_at(4)


def test_reading_a_block_loads_a_small_part_of_its_row_group(tmp_path: Path) -> None:
    texts = [f"{row:05}" + random.Random(row).randbytes(1000).hex() for row in range(5000)]
    path, table = tmp_path / "a.parquet", pyarrow.table({"question": texts, "answer": range(5000)})
    pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
    del table
    (file,) = open_files([path], config(path))
    before = pyarrow.total_allocated_bytes()
    rows = file.read(10)[0]
    assert [row.found["question"] for row in rows] == texts[rows[0].place : rows[-1].place + 1]
    assert pyarrow.total_allocated_bytes() - before < path.stat().st_size / 2  # the open file keeps its buffers


@pytest.mark.parametrize("is_repeated", [True, False])
def test_parquet_blocks_of_long_rows_have_few_rows(tmp_path: Path, is_repeated: bool) -> None:
    texts = [f"{0 if is_repeated else row:04}" * 12_500 for row in range(40)]  # repeated values are stored once
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": texts, "answer": range(40)}), path)
    (file,) = open_files([path], config(path))
    assert [len(file.read(block)[0]) for block in range(file.num_blocks)] == [5] * 8  # of 50 kB each
    assert read_by_block(file) == list(range(40))


def test_a_parquet_file_of_long_rows_behind_short_ones_has_blocks_of_both_sizes(tmp_path: Path) -> None:
    table = pyarrow.table({"question": ["one"] * 100 + ["x" * 50_000] * 15, "answer": range(115)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100, use_dictionary=False)
    (file,) = open_files([tmp_path / "a.parquet"], config(tmp_path / "a.parquet"))
    assert [len(file.read(block)[0]) for block in range(file.num_blocks)] == [100, 5, 5, 5]
    assert read_by_block(file) == list(range(115))


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", numbered_rows(2000))
    (file,) = open_files([path], config(path))
    size = path.stat().st_size
    jsonl(path, numbered_rows(2001))
    assert len(read_by_block(file)) == 2000  # rows at the end are not noticed
    jsonl(path, numbered_rows(1999))
    line = rf"a.jsonl: the file has \d+ bytes, and had {size} when the run started; a file must not change"
    for read in (lambda: read_by_block(file), lambda: list(file.rows()), lambda: file.row_at(0)):
        with pytest.raises(DataError, match=line):
            read()


def test_several_files_are_one_and_rows_count_over_all(tmp_path: Path) -> None:
    rows = numbered_rows(30)
    first = jsonl(tmp_path / "a.jsonl", rows[:10])
    second = parquet(tmp_path / "b.parquet", rows[10:])
    data = config(first, Path(f"{second}@[5:]"))
    wanted = [*range(10), *range(15, 30)]
    assert labels(tmp_path, data) == wanted
    prompts = take(stream(tmp_path, data), 25)
    assert [prompt.label for prompt in prompts] == wanted
    source = stream(tmp_path, data)
    assert [source.at(0, prompt.row) for prompt in prompts] == prompts
    with pytest.raises(KeyError):
        source.at(0, prompts[-1].row + 1)


def test_a_parquet_stream_is_shuffled_and_resumes(tmp_path: Path) -> None:
    data = config(parquet(tmp_path / "a.parquet", numbered_rows(1000), group=300), rollout_shuffle=True)
    prompts = take(stream(tmp_path, data), 1100)
    assert sorted(str(prompt.label) for prompt in prompts[:1000]) == sorted(map(str, range(1000)))
    source = stream(tmp_path, replace(data, num_data_workers=1))
    source.resume_after(0, prompts[600].row)
    assert take(source, 499) == prompts[601:]


def test_values_of_parquet_become_those_of_json(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "one"}]
    row = {
        "question": chat,
        "answer": [1, 2.5],
        "metadata": {"when": datetime.date(2026, 1, 2), "n": decimal.Decimal(3)},
    }
    path = parquet(tmp_path / "a.parquet", [row, {**row, "answer": None}])
    words = tokenizer(tmp_path, TEMPLATE)
    first, second = load_held_out(path, config(path), words)
    assert first.label == [1, 2.5]
    assert first.metadata == {"when": "2026-01-02", "n": "3"}
    assert (first.messages, first.text) == (tuple(chat), "user : one <end> assistant :")
    assert second.label is None
    with pytest.raises(DataError, match=r'a.parquet, row 0: key "prompt" is missing; the row has: question, answer, m'):
        load_held_out(path, config(path, input_key="prompt"), words)
    binary = parquet(tmp_path / "b.parquet", [{"question": "one", "answer": b"1"}])
    with pytest.raises(DataError, match=r'b.parquet, row 0: key "answer" must be a JSON value, got bytes'):
        load_held_out(binary, config(binary), words)


def test_broken_utf8_in_parquet_breaks_one_row(tmp_path: Path) -> None:
    texts = pyarrow.array([b"one", b"\xff", b"two"]).view(pyarrow.string())
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": texts, "answer": [1, 2, 3]}), path)
    with pytest.raises(DataError, match=r"a.parquet, row 1: not readable: .*can't decode byte 0xff"):
        labels(tmp_path, config(path))
    source = stream(tmp_path, config(path))
    assert [prompt.label for prompt in take(source, 2)] == [1, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file has no rows"),
        (b"\n \n", "the file has no rows"),
        ('{"question": "one"}'.encode("utf-16"), "UTF-16 or UTF-32 text; save it as UTF-8"),
        ('{"question": "one"}'.encode("utf-16-le"), "UTF-16 or UTF-32 text; save it as UTF-8"),
        (b"\x1f\x8b\x08\x00", "the file is compressed; unpack it"),
        (b"PAR1....", "a Parquet file; its name must end with .parquet"),
        (b'[{"question": "one"}]', "must be a JSON object, got a list; the file needs one object per line"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    for load in (labels, stream):
        with pytest.raises(DataError) as error:
            load(tmp_path, config(path))
        assert message in str(error.value)
        assert str(path) in str(error.value)


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.parquet", numbered_rows(5))
    with pytest.raises(DataError, match=r"a.parquet: not a Parquet file: "):
        labels(tmp_path, config(path))
    with pytest.raises(DataError, match=r"a.jsonl@\[9:9\]: the slice has no rows"):
        labels(tmp_path, config(Path(f"{jsonl(tmp_path / 'a.jsonl', numbered_rows(5))}@[9:9]")))


def prompts_of(folder: Path, data: DataConfig, template: str | None = TEMPLATE) -> list[Prompt]:
    """The prompts of an epoch, read whole and as a stream, which must be equal but for their rows."""
    source = load_prompts(data, tokenizer(folder, template))
    whole = [source.take() for _ in range(len(source))]
    streamed = take(stream(folder, data, template), len(whole))
    assert [replace(prompt, row=0) for prompt in streamed] == [replace(prompt, row=0) for prompt in whole]
    return whole


def test_labels_may_be_any_json_value(tmp_path: Path) -> None:
    values = ["a", 1, 1.5, True, None, [1, "b"], {"c": [2]}]
    path = jsonl(tmp_path / "a.jsonl", [{"question": "one", "answer": value} for value in values])
    assert [prompt.label for prompt in prompts_of(tmp_path, config(path))] == values


def test_metadata_may_be_missing_an_object_or_its_text(tmp_path: Path) -> None:
    values: list[Any] = [{"a": 1}, '{"a": 1}', None, "", {}, "{}"]
    rows = [{"question": "one", "answer": 1, "metadata": value} for value in values]
    path = jsonl(tmp_path / "a.jsonl", [*rows, {"question": "one", "answer": 1}])
    found = [prompt.metadata for prompt in prompts_of(tmp_path, config(path))]
    assert found == [{"a": 1}, {"a": 1}, {}, {}, {}, {}, {}]


TOOLS = [{"type": "function", "function": {"name": "search"}}]
WITH_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ thinking }} " + TEMPLATE


def test_tools_and_variables_reach_the_template_and_the_metadata(tmp_path: Path) -> None:
    rows = [
        {"question": "one", "answer": 1, "tools": TOOLS},
        {"question": "one", "answer": 1, "tools": '[{"function": {"name": "look"}}]', "metadata": {"a": 1}},
        {"question": "one", "answer": 1, "tools": ['{"function": {"name": "look"}}']},
        {"question": "one", "answer": 1},
    ]
    data = config(
        jsonl(tmp_path / "a.jsonl", rows), apply_chat_template=True, apply_chat_template_kwargs='{"thinking": "no"}'
    )
    found = prompts_of(tmp_path, data, WITH_TOOLS)
    assert [prompt.text.split(" user")[0] for prompt in found] == ["search no", "look no", "look no", "no"]
    assert [prompt.metadata for prompt in found] == [
        {"tools": TOOLS},
        {"a": 1, "tools": [{"function": {"name": "look"}}]},
        {"tools": [{"function": {"name": "look"}}]},
        {},
    ]


@pytest.mark.parametrize(("keys", "kept"), [(HELD_OUT_KEYS, {"thinking": "no"}), (TRAINING_KEYS, {})])
def test_held_out_prompts_keep_their_variables_for_later_turns(tmp_path: Path, keys: str, kept: dict[str, str]) -> None:
    data = config(tmp_path / "a.jsonl", apply_chat_template=True, apply_chat_template_kwargs='{"thinking": "no"}')
    maker = PromptMaker(data, tokenizer(tmp_path, WITH_TOOLS), key_settings=keys)
    (made,) = maker.made([RawRow(place=0, line=1, found={"question": "one", "answer": 1})])
    assert isinstance(made, Made)
    assert made.prompt(0, 0).template_variables == kept


def test_keys_of_other_rows_are_in_no_message_and_no_tool_of_parquet(tmp_path: Path) -> None:
    def row(**parameters: Any) -> dict[str, Any]:
        call = {"function": {"name": "run", "arguments": parameters}}
        chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        return {"question": chat, "answer": 1, "tools": [call], "metadata": parameters}

    rows = [row(city={"type": "text"}), row(number={"type": "number"})]
    path = parquet(tmp_path / "a.parquet", rows)
    found = prompts_of(tmp_path, config(path), "{{ messages[0].content }}")
    assert [prompt.messages for prompt in found] == [tuple(row["question"]) for row in rows]
    assert [prompt.metadata["tools"] for prompt in found] == [row["tools"] for row in rows]
    assert found[0].metadata["number"] is None  # as pyarrow reads it


def test_messages_stay_messages_without_the_flag(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chat = [{"role": "user", "content": "one"}]
    path = jsonl(tmp_path / "a.jsonl", [{"question": chat, "answer": 1}, {"question": "two", "answer": 1}])
    with caplog.at_level("INFO"):
        first, second = prompts_of(tmp_path, config(path))
    assert (first.messages, first.text) == (tuple(chat), "user : one <end> assistant :")
    assert (second.messages, second.text) == (None, "two")
    assert sum("has lists of messages" in message for message in caplog.messages) == 2  # once per source
    (rendered, _) = prompts_of(tmp_path, config(path, apply_chat_template=True))
    assert (rendered.messages, rendered.text) == (None, first.text)
    with pytest.raises(DataError, match=r"a.jsonl:1: .* list of messages, and the checkpoint has no chat template"):
        prompts_of(tmp_path, config(path), template=None)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("metadata", 3, 'key "metadata" must be an object, got a number'),
        ("metadata", [1], 'key "metadata" must be an object, got a list'),
        ("metadata", "[1]", 'key "metadata" must be an object, got a list in its text'),
        ("metadata", "{", 'key "metadata": its text is not JSON: '),
        ("tools", {"a": 1}, 'key "tools" must be a list, got an object'),
        ("tools", "nothing", 'key "tools": its text is not JSON: '),
        ("tools", [{}, "run"], 'key "tools", tool 1 must be an object or its JSON text, got text'),
    ],
)
def test_wrong_metadata_and_tools_are_named(tmp_path: Path, key: str, value: Any, message: str) -> None:
    rows = [*itertools.islice(numbered_rows(9), 1), {"question": "one", "answer": 1, key: value}]
    path = jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError) as error:
        labels(tmp_path, config(path))
    assert str(error.value).startswith(f"{path}:2: {message}")
