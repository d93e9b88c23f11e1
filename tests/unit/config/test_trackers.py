"""The settings of trackers, and the key that no output shows."""

from pathlib import Path

import pytest

from asyncrl.config import TrackerConfig, flat, load_run, resolved
from asyncrl.config.areas import Secret
from tests.unit.config.runs import complaints, complete, load

KEY = "5ec4e7" * 7


def test_slimes_flags_have_their_values(tmp_path: Path) -> None:
    words = "--use-wandb --wandb-project p --wandb-group g --wandb-mode offline --wandb-team t --wandb-host http://h"
    more = f"--wandb-key {KEY} --wandb-run-id i --wandb-dir w --disable-wandb-random-suffix"
    assert load(tmp_path, *words.split(), *more.split()).trackers == TrackerConfig(
        use_wandb=True,
        wandb_project="p",
        wandb_group="g",
        wandb_mode="offline",
        wandb_team="t",
        wandb_host="http://h",
        wandb_key=Secret(KEY),
        wandb_run_id="i",
        wandb_dir=Path.cwd() / "w",
        disable_wandb_random_suffix=True,
    )


def test_the_key_is_shown_by_no_representation(tmp_path: Path) -> None:
    run = load(tmp_path, "--use-wandb", "--wandb-key", KEY)
    assert run.trackers.wandb_key == Secret(KEY)
    assert KEY not in f"{run} {run!r} {resolved(run)} {flat(run)}"
    assert "\n# wandb-key is secret and not written\n" in resolved(run)
    assert flat(run)["wandb_key"] is None


def test_the_key_may_be_in_a_file_which_the_resolved_one_then_lacks(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'use-wandb = true\nwandb-key = "{KEY}"\n')
    run = load_run(["--config", str(path), *complete(tmp_path)])
    assert run.trackers.wandb_key == Secret(KEY)
    path.write_text(resolved(run))
    again = load_run(["--config", str(path)])
    assert again.trackers == TrackerConfig(use_wandb=True)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            "--wandb-project p --wandb-mode offline",
            "wandb-mode, wandb-project without use-wandb: nothing is sent to it; give use-wandb as well, or leave out "
            "wandb-mode, wandb-project",
        ),
        (
            "--use-wandb --trackio-space-id a/b",
            "trackio-space-id without use-trackio: nothing is sent to it; give use-trackio as well, or leave out "
            "trackio-space-id",
        ),
        *(
            (
                f"--use-wandb --wandb-host {host}",
                f"wandb-host must be a URL, as https://wandb.example.com, got '{host}'",
            )
            for host in ("localhost:8080", "wandb.example.com", "http://", "http://[", "ftp://h", "http://h:x")
        ),
        ("--use-wandb --wandb-mode off", '--wandb-mode must be one of online, offline, disabled, got "off"'),
    ],
)
def test_settings_of_a_tracker_that_is_not_used_are_mistakes(flags: str, line: str, tmp_path: Path) -> None:
    assert complaints(*complete(tmp_path), *flags.split()) == [line]


@pytest.mark.parametrize("below", ["file", "file/a/b"])
def test_a_file_is_no_folder_for_wandb(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / below
    assert complaints(*complete(tmp_path), "--use-wandb", "--wandb-dir", str(path)) == [
        f"wandb-dir {path}: {tmp_path / 'file'} is not a folder; give another path"
    ]
