"""The examples of docs/data.md are as the page says."""

import re
from pathlib import Path

import pytest

from asyncrl.config import load_run
from asyncrl.data import load_prompts, load_tokenizer
from asyncrl.data.json_text import MAX_DEPTH
from asyncrl.data.jsonl import BLOCK_BYTES, MAX_ROW_BYTES
from asyncrl.data.parquet import BLOCK_BYTES as PARQUET_BYTES
from asyncrl.data.parquet import BLOCK_ROWS, SAMPLE_ROWS
from asyncrl.data.streaming.account import MOST_NAMED
from asyncrl.data.streaming.opened import HEAD_ROWS
from asyncrl.data.streaming.order import WINDOW_BLOCKS
from asyncrl.data.streaming.workers import ANSWER_S
from asyncrl.errors import DataError

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def example(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_first_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "problems.jsonl").write_text(example("json"))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    words = example("bash").replace("\\\n", " ").split()
    run = load_run(words[words.index("train_async.py") + 1 :])
    tokenizer = load_tokenizer(run.model.hf_checkpoint)
    source = load_prompts(run.data, tokenizer)
    assert sorted(str(source.take().label) for _ in range(len(source))) == ["215", "474"]
    wrong = load_run([*words[words.index("train_async.py") + 1 :], "--input-key", "problem"])
    with pytest.raises(DataError, match=r"problems.jsonl:1: .*problem.* is missing; the row has: question, answer, m"):
        load_prompts(wrong.data, tokenizer)


def test_limits_are_those_of_the_code() -> None:
    assert f"{BLOCK_BYTES >> 10} KiB of a JSONL file" in PAGE
    assert f"at most {BLOCK_ROWS} rows of a row group, and on average at most {PARQUET_BYTES >> 10} KiB" in PAGE
    assert f"the file's first {SAMPLE_ROWS} rows" in PAGE
    assert f"each {WINDOW_BLOCKS} successive blocks" in PAGE
    assert f"| bytes of a row | {MAX_ROW_BYTES >> 20} MiB |" in PAGE
    assert f"| levels of nested lists and objects | {MAX_DEPTH} |" in PAGE
    assert f"the first {HEAD_ROWS} rows" in PAGE
    assert f"names {MOST_NAMED} broken rows" in PAGE
    assert ANSWER_S == 300.0
    assert "does not answer for five minutes" in PAGE
