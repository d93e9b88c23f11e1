"""Streams with real worker processes: order, accounts, resuming, failures."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from asyncrl.data.streaming import order
from asyncrl.data.streaming.stream import PromptStream
from asyncrl.data.streaming.wire import BlockPrompts
from asyncrl.data.streaming.workers import DataWorkers
from asyncrl.errors import DataError
from asyncrl.types import Prompt
from tests.unit.data.prompt_files import config, jsonl, numbered_rows, running, stream, take, taken

ROWS = 3000
"""With 200 bytes each about ten blocks."""


def numbers(prompts: list[Prompt]) -> list[object]:
    return [prompt.label for prompt in prompts]


def test_without_shuffling_rows_come_in_order_and_epochs_wrap(tmp_path: Path) -> None:
    first, second = numbered_rows(ROWS, size=120)[:2000], numbered_rows(ROWS, size=120)[2000:]
    data = config(jsonl(tmp_path / "a.jsonl", first), jsonl(tmp_path / "b.jsonl", second))
    prompts = take(stream(tmp_path, data), ROWS + 500)
    assert numbers(prompts) == [*range(ROWS), *range(500)]
    assert [prompt.epoch for prompt in prompts] == [0] * ROWS + [1] * 500
    assert (prompts[1].text, prompts[1].token_ids) == ("one two", (1, 2))
    assert len({prompt.row for prompt in prompts[:ROWS]}) == ROWS


def test_shuffling_is_seeded_and_does_not_depend_on_the_workers(tmp_path: Path) -> None:
    data = config(jsonl(tmp_path / "a.jsonl", numbered_rows(ROWS, size=120)), rollout_shuffle=True)
    found = [
        numbers(take(stream(tmp_path, replace(data, num_data_workers=workers, rollout_seed=seed)), 2 * ROWS))
        for workers, seed in ((1, 42), (3, 42), (2, 43))
    ]
    assert found[0] == found[1] != found[2]
    for each in found:
        assert sorted(each[:ROWS], key=str) == sorted(each[ROWS:], key=str) == sorted(range(ROWS), key=str)
        assert each[:ROWS] != each[ROWS:]
        assert each[:ROWS] != list(range(ROWS))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_taken", [700, ROWS, ROWS + 1234])
def test_a_resumed_stream_continues_at_the_exact_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool, num_taken: int
) -> None:
    monkeypatch.setattr(order, "WINDOW_BLOCKS", 3)
    rows = jsonl(tmp_path / "a.jsonl", numbered_rows(ROWS, size=120))
    data = config(rows, rollout_shuffle=shuffle, num_data_workers=1)
    prompts = take(stream(tmp_path, data), num_taken + 300)
    last, rest = prompts[num_taken - 1], prompts[num_taken:]
    resumed = stream(tmp_path, data)
    resumed.resume_after(last.epoch, last.row)
    assert take(resumed, 300) == rest
    assert resumed.account.total.rows < ROWS  # earlier blocks are not read
    assert [resumed.at(prompt.epoch, prompt.row) for prompt in prompts[::97]] == prompts[::97]


def test_blocks_of_a_window_are_read_in_the_order_of_the_files(tmp_path: Path) -> None:
    """Going back in a Parquet row group would read it again from its start."""
    requested = []

    class Workers(DataWorkers):
        def request(self, file: int, block: int) -> asyncio.Future[BlockPrompts]:
            requested.append((file, block))
            return super().request(file, block)

    async def first_window(source: PromptStream) -> tuple[tuple[int, int], ...]:
        await source.ready()
        return tuple(requested[: order.WINDOW_BLOCKS])

    paths = [jsonl(tmp_path / name, numbered_rows(20_000, size=120)) for name in ("a.jsonl", "b.jsonl")]
    source = stream(tmp_path, config(*paths, rollout_shuffle=True))
    source._workers = Workers(source._settings)  # noqa: SLF001
    found = running(source, first_window)
    assert found == tuple(sorted(set(found)))


def test_a_position_without_a_row_is_reached_by_reading(tmp_path: Path) -> None:
    data = config(jsonl(tmp_path / "a.jsonl", numbered_rows(50)), num_data_workers=1)
    source = stream(tmp_path, data)
    source.seek(73)
    assert numbers(take(source, 3)) == [23, 24, 25]
    with pytest.raises(ValueError, match="position must be at least 0, got -1"):
        source.seek(-1)


def test_faults_are_named_counted_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = numbered_rows(ROWS, size=120)
    rows[700] = {"answer": 1}
    rows[701]["question"] = "one two three"
    path = jsonl(tmp_path / "a.jsonl", rows)
    source = stream(tmp_path, config(path, rollout_max_prompt_len=2))
    with caplog.at_level(logging.INFO):
        prompts = take(source, ROWS - 2 + 1)
    assert numbers(prompts[:ROWS]) == [*range(700), *range(702, ROWS), 0]
    assert caplog.messages[0].startswith(f'{path}:701: key "question" is missing')
    assert f"prompts of epoch 0: {ROWS} rows = {ROWS - 2} prompts + 1 too long + 1 broken" in caplog.messages
    shuffled = stream(tmp_path, config(path, rollout_max_prompt_len=2, rollout_shuffle=True))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert len(take(shuffled, ROWS - 2)) == ROWS - 2
    with path.open("rb") as handle:
        offset = sum(len(handle.readline()) for _ in range(700))
    assert caplog.messages[0].startswith((f"{path}, byte {offset}: key", f"{path}:701: key"))


def test_a_wrong_key_is_found_before_anything_starts(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", numbered_rows(200))
    with pytest.raises(DataError, match=r'a.jsonl:1: key "prompt" is missing.*\(the first 100 rows are all broken\)'):
        stream(tmp_path, config(path, input_key="prompt"))


def test_an_epoch_without_a_prompt_ends_the_run(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", numbered_rows(200))
    with pytest.raises(ExceptionGroup) as error:
        take(stream(tmp_path, config(path, rollout_max_prompt_len=1)), 1)
    assert "no prompt in a whole epoch: 200 rows = 0 prompts + 200 too long + 0 broken" in str(error.value.exceptions)


async def killed(source: PromptStream, which: list[int]) -> list[Prompt]:
    """Take 2,000 prompts; kill every worker after as many prompts as ``which`` names."""
    prompts = []
    before = set(psutil.Process().children())  # what other tests have left, such as Python's resource tracker
    for number in range(2000):
        await source.ready()
        prompts.append(source.take())
        if number in which:
            for child in set(psutil.Process().children()) - before:
                os.kill(child.pid, signal.SIGKILL)
    return prompts


def test_a_worker_that_dies_is_restarted_once_and_nothing_is_lost(tmp_path: Path) -> None:
    data = config(jsonl(tmp_path / "a.jsonl", numbered_rows(ROWS, size=120)), num_data_workers=1)
    assert numbers(running(stream(tmp_path, data), lambda source: killed(source, [600]))) == list(range(2000))


def test_a_worker_that_dies_again_ends_the_run(tmp_path: Path) -> None:
    data = config(jsonl(tmp_path / "a.jsonl", numbered_rows(ROWS, size=120)), num_data_workers=1)
    with pytest.raises(ExceptionGroup) as error:
        running(stream(tmp_path, data), lambda source: killed(source, [300, 1200]))
    assert "data worker 0 ended by signal 9 twice, the last time at" in str(error.value.exceptions)


def test_workers_end_with_the_stream(tmp_path: Path) -> None:
    async def children(source: PromptStream) -> list[psutil.Process]:
        before = set(psutil.Process().children())  # what other tests have left
        await taken(source, 1)
        return [child for child in psutil.Process().children() if child not in before]

    data = config(jsonl(tmp_path / "a.jsonl", numbered_rows(10)), num_data_workers=3)
    workers = running(stream(tmp_path, data), children)
    assert len(workers) == 3
    assert not any(worker.is_running() for worker in workers)


KILLED = """
import asyncio, os, sys, psutil
from pathlib import Path
from tests.unit.data.prompt_files import config, running, stream, taken

async def wait(source):
    await taken(source, 1)
    print(*(child.pid for child in psutil.Process().children()), flush=True)
    await asyncio.sleep(60)

running(stream(Path(sys.argv[1]), config(Path(sys.argv[1], "a.jsonl"), num_data_workers=2)), wait)
"""


def test_workers_end_when_the_run_is_killed(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", numbered_rows(10))
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in run.stdout.readline().split()]
        run.kill()
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive


def test_waiting_for_a_prompt_can_be_cancelled(tmp_path: Path) -> None:
    async def impatient(source: PromptStream) -> list[Prompt]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await source.ready()
        return await taken(source, 5)

    data = config(jsonl(tmp_path / "a.jsonl", numbered_rows(10)))
    assert numbers(running(stream(tmp_path, data), impatient)) == list(range(5))


def test_a_fingerprint_tells_files_and_settings_apart(tmp_path: Path) -> None:
    path, other = jsonl(tmp_path / "a.jsonl", numbered_rows(10)), jsonl(tmp_path / "b.jsonl", numbered_rows(11))
    same = jsonl(tmp_path / "c.jsonl", numbered_rows(10))
    settings = [
        config(path),
        config(other),
        config(path, other),
        config(tmp_path / "a.jsonl@[0:5]"),
        config(path, rollout_shuffle=True),
        config(path, rollout_shuffle=True, rollout_seed=1),
        config(path, rollout_max_prompt_len=5),
        config(path, label_key=None),
    ]
    fingerprints = [stream(tmp_path, data).fingerprint for data in settings]
    assert len(set(fingerprints)) == len(fingerprints)
    assert stream(tmp_path, config(same, num_data_workers=5)).fingerprint == fingerprints[0]


def test_workers_import_nothing_heavy() -> None:
    program = "import asyncrl.data.streaming.worker, sys; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "ray", "transformers", "pyarrow", "aiohttp"} & set(found)
