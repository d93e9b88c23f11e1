"""The examples' functions without engines, their files as a run checks them, and the commands of their pages."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.app.checks import check
from asyncrl.config import load_run
from asyncrl.plugins.paths import module_of_file
from asyncrl.types import ScoredGroup
from tests.unit.scored_groups import group
from tests.unit.test_start import FLAG, known

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
TRAIN = ROOT / "configs" / "quickstart" / "train.jsonl"
CHECKED = ("custom_reward", "custom_filter", "evaluation_sets", "curriculum", "replay")
PAGES = sorted(str(page.relative_to(ROOT)) for page in EXAMPLES.rglob("README.md"))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def module(path: str) -> Any:
    return module_of_file(EXAMPLES / path)


@pytest.mark.parametrize("name", CHECKED)
def test_a_run_would_start_with_the_files_and_functions_of_an_example(name: str, tmp_path: Path) -> None:
    checked = check(load_run(["--config", f"examples/{name}/cpu.toml", "--run-dir", str(tmp_path)]))
    checked.user_code.close()
    assert [each.settings.name for each in checked.held_out] == {
        "custom_reward": ["arithmetic"],
        "custom_filter": ["arithmetic"],
        "replay": [],
    }.get(name, ["short", "long", "long_greedy", "long_many"])


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_have_flags_of_ours(page: str) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    words = [shlex.split(line) for line in "".join(blocks).replace("\\\n", " ").splitlines()]
    ours = [line for line in words if "train_async.py" in line or line[:1] == ["bash"]]
    assert ours or page == "examples/README.md"
    assert [flag for line in ours for flag in line if FLAG.fullmatch(flag) and not known(flag)] == []
    assert [
        word for line in words for word in line if re.fullmatch(r"[\w/]+\.(?:toml|sh|py)", word) and gone(word)
    ] == []


def gone(path: str) -> bool:
    return not (ROOT / path).exists() and path not in ("my_source.py", "sets.yaml")


# ---- custom_reward


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("349+1=350", {"score": 1.0, "right": 1.0, "sound": 1.0}),
        ("350", {"score": 1.0, "right": 1.0, "sound": 1.0}),
        ("349+2=350", {"score": 0.9, "right": 1.0, "sound": 0.5}),
        ("349+1=349", {"score": 0.1, "right": 0.0, "sound": 0.5}),
        ("", {"score": 0.0, "right": 0.0, "sound": 0.0}),
        ("1234567890+1=x", {"score": 0.0, "right": 0.0, "sound": 0.0}),
    ],
)
def test_score_has_two_parts(text: str, parts: dict[str, float]) -> None:
    score = module("custom_reward/reward.py").score(SimpleNamespace(label="350"), SimpleNamespace(text=text))
    assert score == pytest.approx(parts)


# ---- custom_filter


@pytest.mark.parametrize(
    ("rewards", "texts", "reason"),
    [
        ((1.0, 1.0, 1.0, 1.0), "abcd", "all_right"),
        ((0.0, 0.0, 0.0, 0.0), "abcd", "all_wrong"),
        ((0.0, 0.0, 0.0, 1.0), "aaab", None),
        ((0.0, 0.0, 0.0, 0.5), "aaaa", "repeats"),
    ],
)
def test_filter_names_its_reason(rewards: tuple[float, ...], texts: str, reason: str | None) -> None:
    useful = module("custom_filter/filters.py").Useful(most_same=0.75)
    assert useful(group(0, rewards, texts=list(texts))) == reason


# ---- evaluation_sets


def test_sets_are_those_that_the_script_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = module("evaluation_sets/make.py")
    kept = {name: (EXAMPLES / "evaluation_sets" / f"{name}.jsonl").read_bytes() for name in ("short", "long")}
    monkeypatch.setattr(make, "HERE", tmp_path)
    make.main()
    assert {name: (tmp_path / f"{name}.jsonl").read_bytes() for name in kept} == kept


# ---- curriculum


def source() -> Any:
    return module("curriculum/source.py").Curriculum(SimpleNamespace(prompt_data=TRAIN, seed=7))


def answered(level: int, reward: float) -> ScoredGroup:
    made = group(0, [reward, reward])
    return replace(made, prompt=replace(made.prompt, metadata={"level": level}))


def test_curriculum_moves_to_harder_problems_when_rewards_are_good() -> None:
    curriculum = source()
    assert {curriculum.take().metadata["level"] for _ in range(50)} == {0}
    for _ in range(100):
        curriculum.finished(answered(0, 0.7))  # not good enough
        curriculum.finished(answered(1, 1.0))  # of another level
    assert {curriculum.take().metadata["level"] for _ in range(50)} == {0}
    for _ in range(20):
        curriculum.finished(answered(0, 1.0))
    levels = [curriculum.take().metadata["level"] for _ in range(200)]
    assert set(levels) == {0, 1}
    assert 20 <= levels.count(0) <= 60


def test_curriculum_stays_at_its_last_level() -> None:
    curriculum = source()
    for level in (0, 1, 2, 2):
        for _ in range(100):
            curriculum.finished(answered(level, 1.0))
    assert {curriculum.take().metadata["level"] for _ in range(200)} == {0, 1, 2}


def test_a_resumed_curriculum_gives_the_problems_that_would_have_followed() -> None:
    first, second = source(), source()
    for _ in range(40):
        first.take()
        first.finished(answered(0, 1.0))
    second.load(json.loads(json.dumps(first.state())))
    assert [first.take() for _ in range(20)] == [second.take() for _ in range(20)]


# ---- replay


def test_runs_are_compared_to_the_last_digit(tmp_path: Path) -> None:
    for name, loss in (("first", 0.1), ("again", 0.1), ("other", 0.1 + 2**-56)):
        (tmp_path / name).mkdir()
        row = {"step": 0, "train/loss": loss, "train/grad_norm": 1.5}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    command = [sys.executable, "examples/replay/compare.py", *(str(tmp_path / name) for name in ("first", "again"))]
    assert subprocess.check_output(command, text=True, timeout=150) == "0   0.1 1.5   0.1 1.5   equal\n"
    command[-1] = str(tmp_path / "other")
    assert subprocess.check_output(command, text=True, timeout=150).endswith("   different\n")
