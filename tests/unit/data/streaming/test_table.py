"""Line numbers of rows, in files whose blocks are read in any order."""

import random
import time
from pathlib import Path

from asyncrl.data.jsonl import BLOCK_BYTES, JsonlFile
from asyncrl.data.streaming.table import BlockTable


def file_of(num_blocks: int, *, name: str = "a.jsonl", lines_before: int | None = 0) -> JsonlFile:
    size = num_blocks * BLOCK_BYTES
    return JsonlFile(path=Path(name), first=0, stop=size, lines_before=lines_before, extent=size)


def test_a_line_is_known_once_all_earlier_blocks_were_read() -> None:
    counts = [3, 0, 5, 1, 4, 2]
    table = BlockTable([file_of(4), file_of(len(counts), name="b.jsonl", lines_before=10)])
    blocks, read = list(range(len(counts))), set[int]()
    random.Random(1).shuffle(blocks)
    for block in [*blocks, *blocks]:  # the second epoch notes the same numbers
        table.note_lines(4 + block, counts[block])
        read.add(block)
        for each in range(len(counts)):
            is_known = read.issuperset(range(each))
            line = f"b.jsonl:{10 + sum(counts[:each]) + 2}" if is_known else "b.jsonl, byte 77"
            assert table.where(4 + each, 77, 2) == line


def test_lines_of_a_slice_that_were_not_counted_stay_unknown() -> None:
    table = BlockTable([file_of(2, lines_before=None)])
    table.note_lines(0, 5)
    assert table.where(1, 77, 2) == "a.jsonl, byte 77"
    assert table.where(1, 77, None) == "a.jsonl, byte 77"


def test_naming_rows_at_the_end_of_a_large_file_takes_no_time() -> None:
    """The account names rows on the event loop."""
    num_blocks = 300_000  # 20 GB
    table = BlockTable([file_of(num_blocks)])
    for block in range(num_blocks):
        table.note_lines(block, 20)
    begin = time.process_time()
    for _ in range(100):
        assert table.where(num_blocks - 1, 77, 1) == f"a.jsonl:{20 * (num_blocks - 1) + 1}"
    assert time.process_time() - begin < 0.5  # adding up all blocks for each row takes 3 s
