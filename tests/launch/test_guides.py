"""Every command that slime's guides print for training starts, or ends with the line that docs/slime.md states."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.app.dry_run import dry_run
from asyncrl.config import load_run
from asyncrl.config.slime.table import TABLE
from asyncrl.errors import ConfigError
from tests.launch.guide_commands import GuideCommand, guide_commands, local_files, with_files
from tests.unit.config.test_slime import scripts

COMMANDS = guide_commands()
MODELS = Path(__file__).parent / "models"
DRY = ("--device", "cpu", "--dry-run")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The local files in place of the guides' paths."""
    return local_files(tmp_path_factory.mktemp("guides"))


def named(commands: list[GuideCommand]) -> list[object]:
    return [pytest.param(one, id=one.name) for one in commands]


def test_every_guide_has_commands() -> None:
    assert len(COMMANDS) > 20
    assert len({command.name for command in COMMANDS}) == len(COMMANDS)


@pytest.mark.parametrize("command", named([command for command in COMMANDS if command.stops is None]))
def test_a_command_of_the_guides_is_accepted(
    command: GuideCommand, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files["work"])  # the guides name some files and modules as they are found from there
    console = Console(file=io.StringIO(), width=200)
    run = load_run([*with_files(command.words, files), *DRY], program=command.program)
    dry_run(run, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.endswith("the dry run found nothing wrong\n")
    assert "not there yet" not in text
    for note in command.notes:
        assert f"\nnote: {note}" in f"\n{text}"
    assert (run.rollout.staleness == 0) == (command.program == "train.py" or run.cluster.colocate)


@pytest.mark.parametrize("command", named([command for command in COMMANDS if command.stops is not None]))
def test_a_command_that_cannot_start_ends_with_the_line_of_the_table(
    command: GuideCommand, files: dict[str, str]
) -> None:
    assert command.stops is not None
    with pytest.raises(ConfigError) as error:
        load_run([*with_files(command.words, files), *DRY], program=command.program)
    lines = str(error.value).splitlines()
    assert any(line.startswith(command.stops) for line in lines)
    name = command.stops.split()[0].removeprefix("--")
    assert "is missing" in command.stops or TABLE[name].text in command.stops


@pytest.mark.parametrize(("script", "model"), [("run-glm4-9B.sh", "glm-z1-9b"), ("run-qwen3-4B.sh", "qwen3-4b")])
def test_the_scripts_of_the_guides_are_accepted_as_they_are(script: str, model: str) -> None:
    (flags,) = (flags for title, flags in scripts() if title == f"{script} train.py")
    words = [word for words in flags for word in words]
    console = Console(file=io.StringIO(), width=200)
    run = load_run([*words, "--hf-checkpoint", str(MODELS / model), "--dry-run"], program="train.py")
    dry_run(run, console)
    *_, last = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert last == "the dry run found nothing wrong, but the run cannot start here: 4 things are not there yet"
    assert len(run.foreign) > 10


def test_the_commands_are_read_as_a_shell_would() -> None:
    (complete,) = (command for command in COMMANDS if command.name == "complete-grpo")
    words = " ".join(complete.words)
    assert words.startswith("--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --swiglu")
    assert "--eval-prompt-data aime {held_out} --n-samples-per-eval-prompt 16" in words
    assert "${" not in words
    assert Path(with_files(complete.words, {"model": "/x"})[complete.words.index("--hf-checkpoint") + 1]) == Path("/x")
