"""User code in its process: checked before anything starts, then run by the same process.

check ──▶ UserCode: starts the process on first use, loads each program, gets one line if it does not load
run   ──▶ running: keeps the process and its siblings alive
"""

import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.app.user_programs import reward_program
from asyncrl.compat import SlimeArgs
from asyncrl.config.areas import RewardConfig
from asyncrl.rollouts.user_process.host import UserProcesses, user_processes
from asyncrl.rollouts.user_process.process import UserCodeProcess


class UserCode:
    """The programs of a run that execute user code, and the process that loaded them, if any did."""

    def __init__(self, *, start_timeout_s: float) -> None:
        self.start_timeout_s = start_timeout_s
        self.programs: dict[str, bytes] = {}
        self._process: UserCodeProcess | None = None

    def load(self, name: str, make: Callable[[], Any], label: str) -> dict[str, Any]:
        """Make a program in the process, and return its facts.  Blocks.  Raises PluginError.

        ``label`` names the flag and path in errors that the program cannot name itself.
        """
        if self._process is None:
            self._process = UserCodeProcess()
        factory = pickle.dumps(make)
        facts = self._process.load(name, factory, self.start_timeout_s, label)
        self.programs[name] = factory
        return facts

    def add(self, name: str, make: Callable[[], Any]) -> None:
        """Add a program that was checked elsewhere; no-op if it is there.  Raises PluginError."""
        if name in self.programs:
            return
        if self._process is not None:
            self.load(name, make, name)
        else:  # the process loads it when the run starts
            self.programs[name] = pickle.dumps(make)

    def remove(self, name: str) -> None:
        """Forget a program that does not run in the process."""
        self.programs.pop(name, None)

    def reward(self, config: RewardConfig, args: SlimeArgs) -> tuple[str, Callable[[], Any]]:
        """Return the name and the factory of a user's reward."""
        path, key, is_group = config.custom_rm_path, config.reward_key, config.group_rm
        assert path is not None
        name = f"reward {path} {key} {is_group}"
        return name, partial(reward_program, path, args, key, is_group, Path.cwd())

    @asynccontextmanager
    async def running(self, number: int, logs: Path) -> AsyncIterator[UserProcesses | None]:
        """Keep ``number`` processes alive while the block runs; None if there is no program."""
        started, self._process = self._process, None
        if not self.programs:
            if started is not None:
                started.kill()
            yield None
            return
        async with user_processes(
            self.programs, number=number, log_folder=logs, start_timeout_s=self.start_timeout_s, started=started
        ) as processes:
            yield processes

    def close(self) -> None:
        """End the process of the checks, unless a run has taken it over."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
