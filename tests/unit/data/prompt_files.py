"""Prompt files and settings for tests."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.config import DataConfig
from asyncrl.data.streaming.opened import open_stream
from asyncrl.data.streaming.stream import PromptStream
from asyncrl.types import Prompt
from tests.unit.data.tokenizers_for_tests import TEMPLATE, tokenizer


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write one row per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def numbered_rows(count: int, *, size: int = 0) -> list[dict[str, Any]]:
    """Rows whose label is their number; ``size`` adds so many characters to each."""
    words = ("one", "two", "three")
    return [
        {"question": f"one {words[row % 3]}", "answer": row, "metadata": {"padding": "x" * size}}
        for row in range(count)
    ]


def config(*paths: Path, **changes: Any) -> DataConfig:
    """Settings for the rows above."""
    return replace(DataConfig(prompt_data=paths, input_key="question", label_key="answer"), **changes)


def stream(folder: Path, data: DataConfig, template: str | None = TEMPLATE) -> PromptStream:
    """Open a stream with a tokenizer in ``folder``."""
    return open_stream(replace(data, streaming_data=True), tokenizer(folder, template), folder)


async def taken(source: PromptStream, count: int) -> list[Prompt]:
    """Take ``count`` prompts."""
    prompts = []
    for _ in range(count):
        await source.ready()
        prompts.append(source.take())
    return prompts


def running[T](source: PromptStream, use: Callable[[PromptStream], Awaitable[T]], *, within_s: float = 50.0) -> T:
    """Return the result of ``use`` while ``source`` runs."""

    async def main() -> T:
        async with asyncio.timeout(within_s), asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(source.run())
            found = await use(source)
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
        return found

    return asyncio.run(main())


def take(source: PromptStream, count: int) -> list[Prompt]:
    """Run ``source`` and take ``count`` prompts."""
    return running(source, lambda each: taken(each, count))
