"""The comparison of a run's sockets with docs/security.md fails where it must."""

import contextlib
import socket
from pathlib import Path

import psutil

from tests.listeners import Listener, Row, listening, not_found, rows, showing, unlisted

TABLE = """
| process | socket | one machine | several machines | asks for | could |
|---|---|---|---|---|---|
| `raylet` | tasks | `127.0.0.1` | `node` | a token | read |
| `raylet` | objects | `127.0.0.1` | `node` | a token | read |
| `train.py` | gateway (some runs) | `127.0.0.1`, `all` | `node` | a key | read |
"""
LISTENS = [Listener("raylet", "127.0.0.1"), Listener("raylet", "127.0.0.1")]


def test_a_table_is_read() -> None:
    assert rows(TABLE)[2] == Row(
        process="train.py",
        is_always_there=False,
        one_machine=frozenset({"127.0.0.1", "all"}),
        several_machines=frozenset({"node"}),
    )
    assert len(rows(TABLE)) == 3
    assert rows("| `--key` | you | `a` | `b` |") == ()


def test_every_row_of_the_page_has_known_addresses() -> None:
    assert len(rows()) > 10
    for row in rows():
        assert row.one_machine | row.several_machines
        assert row.one_machine <= {"127.0.0.1"}
        assert row.several_machines <= {"127.0.0.1", "node", "all"}


def test_a_socket_on_every_interface_is_unlisted_where_the_page_has_the_loopback_interface() -> None:
    table = rows(TABLE)
    assert unlisted(LISTENS, table) == []
    assert not_found(LISTENS, table) == []
    wide = [*LISTENS, Listener("raylet", "all"), Listener("train.py", "all"), Listener("other", "127.0.0.1")]
    assert unlisted(wide, table) == [Listener("other", "127.0.0.1"), Listener("raylet", "all")]


def test_a_row_without_its_socket_is_found() -> None:
    assert not_found(LISTENS[1:], rows(TABLE)) == ["raylet"]


def test_sockets_of_a_process_are_found_with_their_addresses() -> None:
    with contextlib.ExitStack() as stack:
        before = listening([psutil.Process()], ())
        for address in ("127.0.0.1", "0.0.0.0", "::", "::ffff:127.0.0.1"):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = stack.enter_context(socket.socket(family))
            listener.bind((address, 0))
            listener.listen()
        found = [each.address for each in listening([psutil.Process()], ())]
    for each in before:
        found.remove(each.address)
    assert sorted(found) == ["127.0.0.1", "127.0.0.1", "all", "all"]


def test_a_secret_in_a_file_or_a_command_line_is_found(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "run.log").write_text("with the key abcdef in it")
    assert showing("abcdef", [tmp_path], []) == [str(tmp_path / "folder" / "run.log")]
    assert showing("uvwxyz", [tmp_path], [psutil.Process()]) == []
    word = psutil.Process().cmdline()[-1]
    assert showing(word, [], [psutil.Process()])[0].startswith("the command line of ")
