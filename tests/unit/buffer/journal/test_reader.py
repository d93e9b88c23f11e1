import logging
import shutil
from pathlib import Path

import pytest

from asyncrl.buffer.journal import Admitted, Delivered, Published, Record, Snapshot, Taken, Trained, Wasted, read
from asyncrl.buffer.journal.frames import FRAME_BYTES, SEGMENT_BYTES, Kind, framed, skimmed
from asyncrl.buffer.journal.reader import opened
from asyncrl.errors import JournalDamaged
from tests.unit.buffer.journal.disks import FewBytesDisk, write
from tests.unit.buffer.journal.made import bits, finished, place

SNAPSHOT = Snapshot(step=0, state={"a": 1}, held=())
RECORDS: tuple[Record, ...] = (
    Admitted(group_id=0, place=place(7), prompts_taken=1, last_taken=(0, 7)),  # type: ignore[arg-type]
    finished(0),
    Taken(step=0, group_ids=(0,)),  # type: ignore[arg-type]
    Trained(step=0, is_skipped=False),
    Published(version=1, step=1),
)
"""One commit, because they are appended at once."""


def segment(folder: Path, number: int) -> Path:
    return folder / f"segment-{number:06d}.journal"


def records(folder: Path) -> list[Record]:
    return [record for _, record in read(folder) if not isinstance(record, Delivered)]


def edges(path: Path) -> list[int]:
    """Return the offsets at which frames begin, and the end."""
    data = memoryview(path.read_bytes())
    return [*(start - FRAME_BYTES for _, start, _ in skimmed(data)), len(data)]


def test_records_come_back_in_order_with_their_numbers(tmp_path: Path) -> None:
    write(tmp_path, [SNAPSHOT, *RECORDS])
    assert bits(records(tmp_path)) == bits([SNAPSHOT, *RECORDS])
    assert [number for number, record in read(tmp_path) if not isinstance(record, Delivered)] == [1, 2, 3, 4, 5, 6]
    assert Delivered(num_tokens=5) in [record for _, record in read(tmp_path)]


def test_a_disk_that_takes_few_bytes_at_a_time_gets_all(tmp_path: Path) -> None:
    write(tmp_path, [SNAPSHOT, *RECORDS], disk=FewBytesDisk())
    assert bits(records(tmp_path)) == bits([SNAPSHOT, *RECORDS])


def test_a_folder_without_segments_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no segment of a journal"):
        next(read(tmp_path))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of one segment: the snapshot, and a commit of all records."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder, [SNAPSHOT, *RECORDS])
    return folder


def test_a_file_that_ends_at_any_byte_gives_its_whole_records(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = segment(whole, 1).read_bytes()
    starts = edges(segment(whole, 1))
    all_records = [bits(record) for _, record in read(whole)]
    for size in range(len(data)):
        caplog.clear()
        segment(tmp_path, 1).write_bytes(data[:size])
        num_whole = sum(stop <= size for stop in starts[1:])
        assert [bits(record) for _, record in read(tmp_path)] == all_records[:num_whole], size
        assert bool(caplog.records) == (size not in starts), size


def test_a_damaged_byte_anywhere_in_the_last_commit_cuts_it_there(whole: Path, tmp_path: Path) -> None:
    data = segment(whole, 1).read_bytes()
    starts = edges(segment(whole, 1))
    all_records = [bits(record) for _, record in read(whole)]
    for place_of_byte in range(starts[1], len(data), 3):
        segment(tmp_path, 1).write_bytes(changed(data, place_of_byte))
        num_whole = sum(stop <= place_of_byte for stop in starts[1:])
        assert [bits(record) for _, record in read(tmp_path)] == all_records[:num_whole], place_of_byte


def changed(data: bytes, place_of_byte: int) -> bytes:
    return data[:place_of_byte] + bytes([data[place_of_byte] ^ 1]) + data[place_of_byte + 1 :]


def test_zeros_behind_the_last_record_are_a_torn_end(whole: Path, tmp_path: Path) -> None:
    """Some file systems leave them after a failure of power."""
    segment(tmp_path, 1).write_bytes(segment(whole, 1).read_bytes() + bytes(5000))
    assert bits(records(tmp_path)) == bits([SNAPSHOT, *RECORDS])
    segment(tmp_path, 1).write_bytes(bytes(5000))
    assert records(tmp_path) == []


def test_damage_before_a_later_commit_is_an_error_with_file_and_offset(whole: Path, tmp_path: Path) -> None:
    data = segment(whole, 1).read_bytes()
    for place_of_byte in range(SEGMENT_BYTES, edges(segment(whole, 1))[1]):  # of the snapshot, a commit alone
        segment(tmp_path, 1).write_bytes(changed(data, place_of_byte))
        with pytest.raises(JournalDamaged, match="a record is damaged, and later ones are whole") as error:
            list(read(tmp_path))
        assert error.value.file == str(segment(tmp_path, 1))
        assert error.value.offset == SEGMENT_BYTES
        assert str(error.value).startswith(f"{segment(tmp_path, 1)}, byte {SEGMENT_BYTES}: ")


def test_a_segment_that_another_one_continues_may_not_be_torn(tmp_path: Path) -> None:
    write(tmp_path, [*RECORDS, SNAPSHOT, *RECORDS])
    first = segment(tmp_path, 1)
    data = first.read_bytes()
    for size in (len(data) - 1, edges(first)[-2] + 1):
        first.write_bytes(data[:size])
        with pytest.raises(JournalDamaged, match="another segment follows"):
            list(read(tmp_path))
    first.write_bytes(data[:20])
    with pytest.raises(JournalDamaged, match="the header of the segment is damaged"):
        list(read(tmp_path))


def test_a_torn_end_before_another_journal_is_cut(tmp_path: Path) -> None:
    write(tmp_path, RECORDS, run_epoch=1)
    data = segment(tmp_path, 1).read_bytes()
    segment(tmp_path, 1).write_bytes(data[:-3])
    write(tmp_path, RECORDS, run_epoch=2)
    assert bits(records(tmp_path)) == bits([*RECORDS[:-1], *RECORDS])


def test_a_segment_without_a_header_before_another_journal_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, RECORDS, run_epoch=1)
    segment(tmp_path, 2).write_bytes(b"ARL")
    write(tmp_path, RECORDS, run_epoch=2)
    assert bits(records(tmp_path)) == bits([*RECORDS, *RECORDS])


def test_what_an_older_run_writes_after_a_newer_one_began_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write(new, [Wasted(num_tokens=1)], run_epoch=1)
    write(new, [Wasted(num_tokens=2)], run_epoch=2)
    with segment(new, 1).open("ab") as file:  # it still has its file open
        file.write(b"".join(bytes(memoryview(each)) for each in framed(1, 3, Kind.WASTED, [b'{"num_tokens":3}'])))
    for _ in range(3):
        write(old, [Wasted(num_tokens=4)], run_epoch=1)
    shutil.copy(segment(old, 3), segment(new, 3))
    assert records(new) == [Wasted(num_tokens=1), Wasted(num_tokens=2)]
    assert "refused, because its run of epoch 1 had lost the folder to one of epoch 2" in caplog.text
    assert [each.segment.number for each in opened(new)] == [1, 2]


def test_a_frame_of_another_run_within_a_segment_is_no_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, [Wasted(num_tokens=1)], run_epoch=2)
    with segment(tmp_path, 1).open("ab") as file:
        file.write(b"".join(bytes(memoryview(each)) for each in framed(1, 2, Kind.WASTED, [b'{"num_tokens":3}'])))
    assert records(tmp_path) == [Wasted(num_tokens=1)]
    assert "incomplete commit" in caplog.text


def test_a_record_that_is_missing_is_damage(tmp_path: Path) -> None:
    write(tmp_path, [Wasted(num_tokens=1), Wasted(num_tokens=2), Wasted(num_tokens=3)])
    path = segment(tmp_path, 1)
    starts, data = edges(path), path.read_bytes()
    path.write_bytes(data[: starts[2]] + data[starts[3] :])
    with pytest.raises(JournalDamaged, match="record 3 follows record 1"):
        list(read(tmp_path))


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"PK\x03\x04" * 20, "no segment of a journal"), (b"ARLJRNL\n\x09" + bytes(50), "format 9, and this version")],
)
def test_another_file_is_named(data: bytes, text: str, tmp_path: Path) -> None:
    segment(tmp_path, 1).write_bytes(data)
    with pytest.raises(JournalDamaged, match=text):
        list(read(tmp_path))


def test_a_record_with_wrong_values_is_damage(tmp_path: Path) -> None:
    write(tmp_path, [Wasted(num_tokens=1)])
    with segment(tmp_path, 1).open("ab") as file:
        file.write(b"".join(bytes(memoryview(each)) for each in framed(1, 2, Kind.WASTED, [b'{"words":3}'])))
    with pytest.raises(JournalDamaged, match="a record of kind WASTED has wrong values"):
        list(read(tmp_path))


def test_a_torn_end_is_reported(whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    segment(tmp_path, 1).write_bytes(segment(whole, 1).read_bytes()[:-2])
    with caplog.at_level(logging.WARNING):
        list(read(tmp_path))
    assert "bytes are an incomplete commit and do not count" in caplog.text
