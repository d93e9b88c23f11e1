"""5,000 rows with planted faults: every fault is named or handled, nothing crashes, and the account holds."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.data import load_prompts
from asyncrl.data.files import open_files
from asyncrl.data.making import Broken, Made, PromptMaker, TooLong
from asyncrl.data.streaming import account
from asyncrl.errors import DataError
from tests.unit.data.planted_faults import BLANK, FAULTS, GOOD, LONG, Planted, joined, planted_lines
from tests.unit.data.prompt_files import config, stream, take
from tests.unit.data.tokenizers_for_tests import TEMPLATE, tokenizer

NUM_LINES = 5000
LIMIT = 40


@pytest.fixture(scope="module", params=[1, 2])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Planted]]:
    lines = planted_lines(NUM_LINES, request.param)
    path = tmp_path_factory.mktemp("faults") / "a.jsonl"
    path.write_bytes(joined(lines, request.param))
    return path, lines


def outcome(made: Made | TooLong | Broken) -> str:
    return GOOD if isinstance(made, Made) else LONG if isinstance(made, TooLong) else made.fault


def test_every_row_has_its_planted_outcome(file: tuple[Path, list[Planted]], tmp_path: Path) -> None:
    path, lines = file
    data = config(path, rollout_max_prompt_len=LIMIT)
    (opened,) = open_files([path], data)
    rows = list(opened.rows())
    assert [row.line for row in rows] == [number for number, line in enumerate(lines, 1) if line.outcome != BLANK]
    found = list(PromptMaker(data, tokenizer(tmp_path, TEMPLATE)).made(rows))
    for row, made in zip(rows, found, strict=True):
        planted = lines[(row.line or 0) - 1]
        assert outcome(made).startswith(planted.outcome), f"line {row.line}"
        assert not isinstance(made, Made) or planted.label is None or made.label == planted.label
        assert "\n" not in outcome(made)
        assert len(outcome(made)) < 400


def test_a_stream_names_every_fault_and_its_account_holds(
    file: tuple[Path, list[Planted]], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lines = file
    monkeypatch.setattr(account, "MOST_NAMED", NUM_LINES)
    good = [line for line in lines if line.outcome == GOOD]
    faults = [(number, line) for number, line in enumerate(lines, 1) if line.outcome not in (GOOD, LONG, BLANK)]
    source = stream(tmp_path, config(path, rollout_max_prompt_len=LIMIT))
    with caplog.at_level(logging.INFO):
        prompts = take(source, len(good) + 1)
    assert [prompt.label for prompt, line in zip(prompts, good, strict=False) if line.label is not None] == [
        line.label for line in good if line.label is not None
    ]
    assert prompts[-1].epoch == 1
    counts = {wanted: sum(line.outcome == wanted for line in lines) for wanted in (GOOD, LONG, BLANK)}
    whole = (
        f"{NUM_LINES - counts[BLANK]} rows = {counts[GOOD]} prompts + {counts[LONG]} too long + {len(faults)} broken"
    )
    assert f"prompts of epoch 0: {whole}" in caplog.messages
    named = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    for (number, planted), message in zip(faults, named[: len(faults)], strict=True):
        assert message.startswith(f"{path}:{number}: {planted.outcome}")


@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: planted.outcome[:40])
def test_without_streaming_the_first_fault_ends_the_run(tmp_path: Path, planted: Planted) -> None:
    path = tmp_path / "a.jsonl"
    plain = Planted(b'{"question": "one", "answer": 1}', GOOD)
    path.write_bytes(joined([plain, plain, planted, plain], 1))
    with pytest.raises(DataError) as error:
        load_prompts(replace(config(path), rollout_max_prompt_len=LIMIT), tokenizer(tmp_path, TEMPLATE))
    assert str(error.value).startswith(f"{path}:3: {planted.outcome}")
    assert "\n" not in str(error.value)
