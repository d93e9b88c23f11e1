"""A life: one run with one fault, resumed until it has trained to the end."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from benchmarks.chaos import disks, holds
from benchmarks.chaos.accounts import BROKEN, DOCUMENTED, SKIPPED, TO_THE_END, Attempt, Told, figures, verdict
from benchmarks.chaos.faults import VICTIMS, Life
from benchmarks.chaos.processes import free_port
from benchmarks.chaos.runs import Run
from benchmarks.chaos.user_code import MISBEHAVES
from benchmarks.common.circumstances import ROOT

NUM_STEPS = 32
MOST_ATTEMPTS = 3
START_S = 900.0
"""Seconds for the steps before the fault, on a busy machine."""
HANG_S = 200.0
"""Seconds without a step or an end after which a run counts as hung.  All deadlines of the run are shorter."""
HELD_S = 30.0
"""Seconds for a run to come to an armed moment."""
DISK_MB = 256
FLAGS: Mapping[str, object] = {
    "config": "configs/quickstart.toml",
    "num-rollout": NUM_STEPS,
    "save-interval": 4,
    "eval-interval": NUM_STEPS,
    "skip-eval-before-train": True,
    "control-timeout-s": 15,
    "request-timeout-s": 20,
    "train-timeout-s": 40,
    "watchdog-timeout-s": 120,
    "start-timeout-s": 180,
    "rollout-all-samples-process-path": "benchmarks/chaos/user_code.py:trained",
}
"""Flags of every run: deadlines of seconds, because a life lasts a minute."""


class Play:
    """The attempts of one life, in their folder."""

    def __init__(self, life: Life, folder: Path, tell: Callable[[str], None]) -> None:
        self.life = life
        self.fault = life.fault
        self._folder = folder
        self._tell = tell
        self._stack = ExitStack()
        self._save = folder / "checkpoints"
        self._disk = folder / "disk"
        self._hold = folder / "hold"
        self._misbehaves = folder / "misbehaves"
        self._port = free_port()
        self._server: subprocess.Popen[bytes] | None = None
        self._fault_at: float | None = None
        self._next_step_s: float | None = None
        self._lifted_at: float | None = None
        self._second: Run | None = None
        self._notes: list[str] = []

    def played(self) -> Told:
        """Play the life to its end and return its row."""
        began = time.monotonic()
        self._folder.mkdir(parents=True)
        with self._stack:
            why_not = self._prepared()
            attempts = [] if why_not else self._attempts()
        told = self._told(attempts, why_not)
        shutil.rmtree(self._save, ignore_errors=True)
        return replace(told, seconds=time.monotonic() - began)

    # ---- preparation

    def _prepared(self) -> str | None:
        """Prepare the surroundings of the run; return why that is not possible, or None."""
        if self.fault.kind == "full":
            if why := disks.mount(self._disk, DISK_MB):
                return f"no tmpfs: {why}"
            self._stack.callback(disks.unmount, self._disk)
            if self.fault.target == "save":
                self._save = self._disk / "checkpoints"
        if self.fault.name == "reward-away":
            self._serve()
            self._stack.callback(self._end_server)
        return None

    def _flags(self, number: int) -> tuple[Path, list[str]]:
        """Return the run directory and the flags of an attempt."""
        run_dir = (self._disk if self.fault.name == "full-run-dir" else self._folder) / f"run-{number}"
        flags = {**FLAGS, "save": self._save, "load": self._save, "seed": 1234 + self.life.seed}
        if self.fault.name == "full-transport":
            flags |= {"update-weight-transport": "disk", "update-weight-disk-dir": self._disk}
        if self.fault.name == "reward-away":
            flags |= {"rm-type": "remote_rm", "rm-url": f"http://127.0.0.1:{self._port}/"}
        elif self.fault.kind == "reward":
            flags["custom-rm-path"] = f"benchmarks/chaos/user_code.py:{self.fault.target}"
            flags["reward-timeout-s"] = 30 if self.fault.target == "slow" else 5
        return run_dir, _words(flags)

    def _environment(self) -> dict[str, str]:
        ports = {"ASYNCRL_CHAOS_PORTS": "same"} if self.fault.name == "second-ports" else {}
        return {**holds.environment(self._hold, self._save), MISBEHAVES: str(self._misbehaves), **ports}

    # ---- attempts

    def _attempts(self) -> list[Attempt]:
        attempts = []
        for number in range(1, MOST_ATTEMPTS + 1):
            run_dir, flags = self._flags(number)
            run = Run(run_dir, f"{self._folder}-{number}", flags, self._environment(), self._folder)
            self._stack.callback(run.family.kill)
            if number == 1:
                self._met(run)
            self._to_its_end(run)
            self._lift(run)
            is_signalled = number == 1 and self.fault.name == "kill-driver"
            self._tell(f"attempt {number} ended with {'no progress' if run.code is None else f'code {run.code}'}")
            attempts.append(run.ended(self._fault_at, is_signalled=is_signalled))
            if attempts[-1].code == 0:
                break
        return attempts

    def _met(self, run: Run) -> None:
        """Wait for the moment of the fault and let it happen."""
        life, moment = self.life, self.fault.moment
        if moment == "start":
            self._happen(run)
            return
        if not run.wait_until(lambda: run.num_steps() >= life.step, START_S):
            return
        if moment == "random":
            run.wait_until(lambda: False, life.delay_s)
        else:
            holds.arm(self._hold, holds.UPDATE if moment == "update" else life.rename)
            if not run.wait_until(lambda: holds.is_reached(self._hold), HELD_S):
                self._notes.append(f"no process came to the moment {moment}")
        try:
            self._happen(run)
        finally:
            holds.release(self._hold)

    def _to_its_end(self, run: Run) -> None:
        """Watch a run until it ends, or makes no progress for HANG_S."""
        steps, moved_at = run.num_steps(), time.monotonic()
        while run.code is None and time.monotonic() - moved_at < HANG_S:
            moved = run.wait_until(partial(self._has_moved, run, steps), HANG_S)
            if self._is_due():
                self._lift(run)
            if moved and run.num_steps() > steps:
                steps, moved_at = run.num_steps(), time.monotonic()
                self._stepped()
        if run.num_steps() > steps:
            self._stepped()

    def _has_moved(self, run: Run, steps: int) -> bool:
        if self.fault.kind == "full" and self._lifted_at is not None:
            disks.fill(self._disk)  # the run itself removes files
        return run.num_steps() > steps or self._is_due()

    def _stepped(self) -> None:
        if self._fault_at is not None and self._next_step_s is None:
            self._next_step_s = time.time() - self._fault_at
            self._tell(f"next step {self._next_step_s:.1f} s after the fault")

    # ---- the fault

    def _happen(self, run: Run) -> None:
        fault = self.fault
        if fault.kind in ("kill", "stop"):
            self._signal(run, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        elif fault.kind == "full":
            disks.fill(self._disk)
        elif fault.name == "reward-away":
            self._end_server()
        elif fault.kind == "reward":
            self._misbehaves.touch()
        else:
            self._start_second()
        self._fault_at = time.time()
        self._lifted_at = None if fault.lifted_after_s is None else self._fault_at + fault.lifted_after_s
        self._tell(f"{fault.name} ({fault.moment}) after {run.num_steps()} steps")

    def _signal(self, run: Run, number: signal.Signals) -> None:
        victims = run.victims(VICTIMS[self.fault.target])
        if not victims:
            self._notes.append(f"there is no {self.fault.target}")
            return
        victims[self.life.number % len(victims)].send_signal(number)

    def _is_due(self) -> bool:
        return self._lifted_at is not None and time.time() >= self._lifted_at

    def _lift(self, run: Run) -> None:
        """End the fault, if it lasts."""
        self._lifted_at = None
        if self.fault.name == "stop-driver" and run.code is None:
            run.process.send_signal(signal.SIGCONT)
        elif self.fault.kind == "full":
            disks.free(self._disk)
        elif self.fault.name == "reward-away" and self._server is None:
            self._serve()
        self._misbehaves.unlink(missing_ok=True)

    def _serve(self) -> None:
        command = [sys.executable, "-m", "benchmarks.chaos.user_code", str(self._port)]
        self._server = subprocess.Popen(command, cwd=ROOT)

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def _start_second(self) -> None:
        """Start a second run: with the same ports, or with the same folder of checkpoints."""
        _, flags = self._flags(1)
        if self.fault.target == "ports":
            flags = _words({**FLAGS, "save": self._folder / "checkpoints-2", "seed": 99})
        mark = f"{self._folder}-second"
        self._second = Run(self._folder / "second", mark, flags, self._environment(), self._folder)
        self._stack.callback(self._second.family.kill)

    # ---- the row

    def _told(self, attempts: list[Attempt], why_not: str | None) -> Told:
        life, fault = self.life, self.fault
        row = Told(life=life.number, seed=life.seed, fault=fault.name, moment=fault.moment, notes=tuple(self._notes))
        if why_not:
            return replace(row, verdict=f"{SKIPPED}: {why_not}")
        found = figures(attempts, self._state())
        end = verdict(
            attempts,
            found,
            num_steps=NUM_STEPS,
            may_fail=fault.kind == "reward",
            must_continue=fault.must_continue,
        )
        if self._fault_at is None:
            end = f"{BROKEN}: the run ended before the fault"
        said = next((each.said for each in attempts if each.said), "")
        if self._second is not None:
            end, said = self._with_second(end, said)
        return replace(
            row,
            codes=tuple(attempt.code for attempt in attempts),
            said=said,
            next_step_s=self._next_step_s,
            figures=found,
            left=sum(len(attempt.left) for attempt in attempts),
            left_s=max(attempt.left_s for attempt in attempts),
            verdict=end,
        )

    def _with_second(self, end: str, said: str) -> tuple[str, str]:
        """Return verdict and line with what became of the second run."""
        second = self._second
        if second is None:
            raise AssertionError("there is no second run")
        self._to_its_end(second)
        attempt = second.ended(self._fault_at, is_signalled=False)
        wanted = 0 if self.fault.target == "ports" else 1
        if attempt.code != wanted:
            why = f"the second run ended with {attempt.code}, not {wanted}"
            return (f"{end}; {why}" if end.startswith(BROKEN) else f"{BROKEN}: {why}"), attempt.said or said
        return (DOCUMENTED if end == TO_THE_END and wanted else end), attempt.said or said

    def _state(self) -> Mapping[str, Any] | None:
        """Return the state of the run in its last checkpoint."""
        files = sorted(self._save.glob("iter_???????/run.json"))
        return orjson.loads(files[-1].read_bytes())["run"]["state"] if files else None


def _words(flags: Mapping[str, object]) -> list[str]:
    words = []
    for name, value in flags.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words
