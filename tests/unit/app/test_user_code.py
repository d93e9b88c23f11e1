"""User code is checked in its process: the controller imports none of it, and a mistake gets one line."""

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from asyncrl.app.rewards import build_reward
from asyncrl.app.user_code import UserCode
from asyncrl.app.user_programs import check_episode
from asyncrl.compat import SlimeArgs
from asyncrl.config.areas import RewardConfig
from asyncrl.errors import PluginError
from asyncrl.rewards.functions import InPool, InUserProcess

FLAG = "--custom-generate-function-path"


@pytest.fixture
def user_code() -> Iterator[UserCode]:
    code = UserCode(start_timeout_s=20.0)
    yield code
    code.close()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def check(user_code: UserCode, code: str, path: str = "mine.py:episode") -> dict[str, object]:
    Path("mine.py").write_text(code)
    return user_code.load("episodes", partial(check_episode, path, Path.cwd()), f"{FLAG} '{path}'")


def test_the_controller_imports_nothing_of_it(user_code: UserCode) -> None:
    code = "import os, helper_apart\nos.environ['SET_APART'] = '1'\nasync def episode(ep): pass"
    Path("helper_apart.py").write_text("")
    assert check(user_code, code) == {"shape": "native"}
    assert "SET_APART" not in os.environ
    assert "helper_apart" not in sys.modules


def test_slimes_modules_are_found_in_the_process(user_code: UserCode) -> None:
    code = "from slime.utils.types import Sample\nasync def episode(args, sample, sampling_params): return sample"
    assert check(user_code, code) == {"shape": "slime"}


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("def episode(ep): pass", "must be written with 'async def', not 'def'"),
        ("import no_such_module", "raised on import: ModuleNotFoundError: No module named 'no_such_module' ("),
        ("1 / 0", "raised on import: ZeroDivisionError: division by zero ("),
        ("import sys; sys.exit(4)", "raised on import: SystemExit: 4 ("),
        ("import os; os._exit(4)", "its import ended the process: exit code 4"),
        ("import os; os.kill(os.getpid(), 11)", "its import ended the process: signal 11, Segmentation fault"),
    ],
)
def test_a_mistake_gets_one_line(user_code: UserCode, code: str, line: str) -> None:
    with pytest.raises(PluginError) as caught:
        check(user_code, code)
    assert str(caught.value).startswith(f"{FLAG} 'mine.py:episode': {line}")
    assert "\n" not in str(caught.value)


def test_an_import_that_hangs_has_a_limit() -> None:
    with pytest.raises(PluginError, match=r"its import did not end within 1 s \(start-timeout-s\)"):
        check(UserCode(start_timeout_s=1.0), "import time; time.sleep(60)")


def test_rewards_of_a_run_with_episodes_are_imported_there_too(user_code: UserCode) -> None:
    Path("mine.py").write_text("async def waits(prompt, sample): pass\ndef plain(prompt, sample): pass")
    made = [
        build_reward(RewardConfig(custom_rm_path=f"mine.py:{name}"), SlimeArgs(), user_code, has_episodes=True)
        for name in ("waits", "plain")
    ]
    assert [type(each) for each in made] == [InUserProcess, InPool]
    assert len(user_code.programs) == 1
    with pytest.raises(PluginError, match=r"^--custom-rm-path 'mine.py:none': mine.py has no function 'none'"):
        build_reward(RewardConfig(custom_rm_path="mine.py:none"), SlimeArgs(), user_code, has_episodes=True)
