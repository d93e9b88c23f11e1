import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.commands.main import COMMANDS, benchmarks, main
from asyncrl.config.command_line import FIRST, parser
from asyncrl.config.knobs import knobs

ROOT = Path(__file__).parents[3]
SCRIPT = Path(sys.executable).with_name("asyncrl")


@pytest.fixture(autouse=True)
def own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command renames the program for argparse, and runs modules, which other tests may have imported."""
    monkeypatch.setattr(sys, "argv", ["asyncrl"])
    for name in [name for name in sys.modules if name.startswith("benchmarks.")]:
        monkeypatch.delitem(sys.modules, name)


def ended(words: Sequence[str], code: int) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code


def test_help_has_one_line_for_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    ended(["--help"], 0)
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in COMMANDS)


def test_without_a_command_the_help_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    ended([], 2)
    assert capsys.readouterr().out.startswith("usage: asyncrl COMMAND")


def test_a_misspelled_command_gets_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    ended(["trian"], 2)
    assert capsys.readouterr().err == "error: asyncrl has no command 'trian'; did you mean train?\n"


def test_a_strange_command_is_told_where_the_commands_are(capsys: pytest.CaptureFixture[str]) -> None:
    ended(["zzz"], 2)
    assert "asyncrl --help lists the commands" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["doctor", "simulate"])
def test_each_program_shows_its_own_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    ended([command, "--help"], 0)
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "word"), [("convert", "to-torch-dist"), ("train", "usage: asyncrl train [--config")]
)
def test_each_program_shows_its_own_help_in_a_process(command: str, word: str) -> None:
    """``train`` ends its process, and ``convert`` imports torch."""
    found = subprocess.run([SCRIPT, command, "--help"], capture_output=True, text=True, timeout=360, check=True)
    assert word in found.stdout


def test_train_refuses_a_wrong_flag_in_one_line() -> None:
    found = subprocess.run([SCRIPT, "train", "--num-rolout", "3"], capture_output=True, text=True, timeout=360)
    assert found.returncode == 2
    assert found.stderr == "error: unknown flag --num-rolout; did you mean --num-rollout?\n"


def test_every_benchmark_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    names = {path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")}
    assert set(benchmarks()) == names
    assert all(benchmarks().values())
    ended(["bench", "--help"], 0)
    assert "  chaos " in capsys.readouterr().out


def test_a_benchmark_gets_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    ended(["bench", "chaos", "--list"], 0)
    assert "kill-driver" in capsys.readouterr().out


def test_a_misspelled_benchmark_gets_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    ended(["bench", "chaso"], 2)
    assert "did you mean chaos?" in capsys.readouterr().err


def test_outside_a_checkout_benchmarks_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("asyncrl.commands.main.find_spec", lambda name: None)
    ended(["bench", "chaos"], 2)
    assert "run this in a checkout" in capsys.readouterr().err


def test_workers_that_import_the_command_import_little() -> None:
    code = "import sys, asyncrl.commands.main; print(any(name in sys.modules for name in ('torch', 'ray', 'asyncio')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    assert found.stdout == "False\n"


def test_the_script_of_the_package_is_installed() -> None:
    found = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, timeout=180, check=True)
    assert found.stdout.startswith("usage: asyncrl COMMAND")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_flags_and_benchmarks(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    ended(["completion", shell], 0)
    script = capsys.readouterr().out
    assert all(word in script for word in ("train", "--max-staleness", "sync_vs_async", "to-torch-dist"))


def test_bash_completes_flags_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(["completion", "bash"], 0)
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    (tmp_path / "runs" / "sums").mkdir(parents=True)
    (tmp_path / "runs" / "notes.txt").touch()
    asked = ("train --max-st", "page --po", "page runs/", "journal runs/")
    asks = [f"COMP_WORDS=(asyncrl {words}); COMPREPLY=(); _shtab_asyncrl; echo ${{COMPREPLY[@]}}" for words in asked]
    program = "; ".join(["source ./completion; COMP_CWORD=2", *asks])
    found = subprocess.run(
        ["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=180, check=True
    )
    assert found.stdout.split() == ["--max-staleness", "--port", "runs/sums", "runs/sums"]


def test_the_flags_that_matter_most_come_first() -> None:
    shown = parser().format_help()
    assert len(FIRST) == 20
    assert set(FIRST) <= set(knobs())
    places = [shown.index(f"\n  --{name}") for name in FIRST]
    others = [shown.index(f"\n  --{name}") for name in knobs() if name not in FIRST]
    assert places == sorted(places)
    assert max(places) < min(others)
