"""Check the journal of a run: list its segments and count its records, and verify every checksum.

Nothing is changed, and the run may be running.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.errors import DataError, JournalDamaged
from asyncrl.journal.account import account
from asyncrl.journal.export import export
from asyncrl.journal.listing import folder_of, listing

_EXIT_CODES = """exit codes:
  0  every checksum is right
  1  a record is damaged, or a file cannot be read or written
  2  there is no journal, or it does not have the step"""
_END = -1


def main(argv: Sequence[str]) -> int:
    """Do what ``argv`` asks for, and return the exit code."""
    given = parser().parse_args(argv)
    try:
        for line in _lines(given):
            sys.stdout.write(f"{line}\n")
    except DataError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except (JournalDamaged, OSError) as error:
        sys.stdout.flush()
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's words."""
    words = argparse.ArgumentParser(
        description=__doc__, epilog=_EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        type=Path,
        help="Run directory, whose settings name the folder of --save; or that folder, which has the journal.",
    )
    words.add_argument(
        "--account",
        metavar="STEP",
        type=_step,
        nargs="?",
        const=_END,
        help="Show the account of groups and tokens after STEP training steps; without STEP, at the end.",
    )
    words.add_argument("--export", metavar="FILE", type=Path, help="Write the finished groups to a Parquet file.")
    return words


def _step(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        text = f"STEP must be a number, got {word}; give a folder in front of the flag: {word} --account"
        raise argparse.ArgumentTypeError(text) from None


def _lines(given: argparse.Namespace) -> Iterator[str]:
    folder = folder_of(given.run_dir)
    if given.account is not None:
        yield from account(folder, None if given.account == _END else given.account)
    if given.export is not None:
        yield f"{export(folder, given.export):,} groups in {given.export}"
    if given.account is None and given.export is None:
        yield from listing(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
