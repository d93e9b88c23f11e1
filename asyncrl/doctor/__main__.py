"""Translate a launch script of slime's into a TOML file of asyncrl, and list what differs or is missing.

The TOML file is written to standard output, or to the file after ``--out``; the report to standard error.  Nothing of
the script is run.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.doctor.report import examine_script, written
from asyncrl.errors import DataError

_EXIT_CODES = """exit codes:
  0  nothing is missing: the run starts as it is
  1  something is missing: a flag, a value, a file, a function or a symbol; or the script loses flags
  2  the script cannot be read, or has no training command"""


def main(argv: Sequence[str]) -> int:
    """Examine the script that ``argv`` names, and return the exit code."""
    root = parser()
    given = root.parse_args(argv)
    wrong = [each for each in given.env if "=" not in each]
    if wrong:
        root.error(f"--env must be NAME=VALUE, got {wrong[0]}")
    try:
        report = examine_script(given.script, dict(each.split("=", 1) for each in given.env))
        if given.out is not None:
            given.out.write_text(report.toml, encoding="utf-8")
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    if given.out is None:
        sys.stdout.write(report.toml)
        sys.stdout.flush()
    sys.stderr.write(written(report) + "\n")
    return 1 if report.num_obstacles else 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    root = argparse.ArgumentParser(
        prog="python -m asyncrl.doctor",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("script", type=Path, help="launch script, a bash file that starts train.py or train_async.py")
    root.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="variable that the script expects in its environment; may be repeated",
    )
    root.add_argument("--out", type=Path, metavar="FILE.toml", help="file for the settings (default: standard output)")
    return root


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
