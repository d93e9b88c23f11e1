"""The settings that a checkpoint keeps, and the lines about their changes when a run resumes."""

from pathlib import Path

import pytest

from asyncrl.config.resolved import MOST_CHANGES, changes, kept
from tests.unit.config.runs import load

SINCE = "changed since the checkpoint"


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        ("", "", ()),
        ("--lr 1e-5", "", (f"{SINCE}: lr 1e-05 → 1e-06",)),
        ("", "--eps-clip-c 3", (f"{SINCE}: eps-clip-c (not given) → 3.0",)),
        ("--eps-clip-c 3", "", (f"{SINCE}: eps-clip-c 3.0 → (not given)",)),
        ("--max-staleness 2", "--max-staleness 1", (f"{SINCE}: max-staleness 2 → 1",)),
        ("", "--sglang-page-size 4", (f'{SINCE}: sglang-page-size (not given) → "4"',)),
        ("--sglang-page-size 4", "", (f'{SINCE}: sglang-page-size "4" → (not given)',)),
        (
            "",
            "--train-timeout-s 999 --gateway-port 7777",
            (f"{SINCE}, without effect on training: gateway-port, train-timeout-s",),
        ),
        (
            "--num-layers 2 --hidden-size 128 --rotary-base 1e6",
            "",
            (
                f"{SINCE}: rotary-base 1000000.0 → (not given)",
                f"{SINCE}, without effect on training: num-layers, hidden-size",
            ),
        ),
        ("", "--save b --load b --save-interval 3 --run-dir r --no-timeline", ()),
        ("", "--no-rope-fusion", ()),  # accepted and without a setting
    ],
)
def test_changes_are_listed(tmp_path: Path, before: str, now: str, lines: tuple[str, ...]) -> None:
    found = changes(kept(load(tmp_path, *before.split())), load(tmp_path, *now.split()))
    assert found == lines


def test_paths_alone_are_without_effect(tmp_path: Path) -> None:
    run = load(tmp_path)
    before = {**kept(run), "hf-checkpoint": '"/elsewhere"'}
    assert changes(before, run) == (f"{SINCE}, without effect on training: hf-checkpoint",)


def test_settings_of_other_versions_are_not_listed(tmp_path: Path) -> None:
    run = load(tmp_path, "--no-normalize-advantages")
    before = {**kept(run), "a-setting-that-was-removed": "1"}
    for new in ("weight-decay", "rollout-shuffle", "max-staleness", "normalize-advantages"):
        del before[new]
    assert changes(before, run) == (f"{SINCE}: normalize-advantages (not given) → false",)


def test_many_changes_take_few_lines(tmp_path: Path) -> None:
    run = load(tmp_path)
    before = {name: value + "0" if value[-1].isdigit() else value for name, value in kept(run).items()}
    found = changes(before, run)
    assert len(found) == MOST_CHANGES + 2
    assert found[MOST_CHANGES].startswith(f"{SINCE}, too: ")
    assert "lr" in found[MOST_CHANGES].removeprefix(f"{SINCE}, too: ").split(", ")


def test_long_values_are_cut(tmp_path: Path) -> None:
    (line,) = changes(kept(load(tmp_path)), load(tmp_path, "--rollout-stop", "x" * 500))
    assert len(line) < 200


def test_secrets_are_not_kept(tmp_path: Path) -> None:
    run = load(tmp_path, "--sglang-api-key", "abc", "--wandb-key", "abc", "--use-wandb")
    assert not [name for name, value in kept(run).items() if "abc" in value]
    assert kept(run)["label-key"] == '"label"'
