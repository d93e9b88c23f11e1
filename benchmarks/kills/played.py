"""A life: one run that is killed again and again, and resumed until it has trained to the end."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson

from benchmarks.chaos import holds
from benchmarks.chaos.accounts import Attempt
from benchmarks.chaos.faults import VICTIMS
from benchmarks.chaos.runs import Run
from benchmarks.kills.drawn import KILLS_PER_LIFE, NUM_STEPS, SAVE_INTERVAL, Kill, Life
from benchmarks.kills.history import Keeper
from benchmarks.kills.told import Blow

MOST_ATTEMPTS = 2 * KILLS_PER_LIFE
HANG_S = 200.0
"""Seconds without a step or an end after which a run counts as hung.  All deadlines of the run are shorter."""
HELD_S = 30.0
"""Seconds for a run to come to an armed moment."""
CONFIGS = {"dense": "configs/quickstart.toml", "mixture": "configs/quickstart_moe.toml"}
FLAGS: Mapping[str, object] = {
    "num-rollout": NUM_STEPS,
    "rollout-batch-size": 8,
    "n-samples-per-prompt": 4,
    "save-interval": SAVE_INTERVAL,
    "eval-interval": NUM_STEPS,
    "skip-eval-before-train": True,
    "max-engine-restarts": 100,
    "control-timeout-s": 15,
    "request-timeout-s": 20,
    "train-timeout-s": 40,
    "watchdog-timeout-s": 120,
    "start-timeout-s": 180,
    "sglang-skip-server-warmup": True,
    "rollout-all-samples-process-path": "benchmarks/chaos/user_code.py:trained",
}
"""Flags of every run: small batches and deadlines of seconds, because the start of a run is most of its time."""

COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
"""Environment of every run: the modules that one start has compiled are there for the next."""


class Play:
    """The attempts of one life, in their folder."""

    def __init__(self, life: Life, folder: Path, tell: Callable[[str], None]) -> None:
        self.life = life
        self.folder = folder
        self.attempts: list[Attempt] = []
        self.blows: list[Blow] = []
        self.notes: list[str] = []
        self.save = folder / "checkpoints"
        self._tell = tell
        self._stack = ExitStack()
        self._hold = folder / "hold"
        self._keeper = Keeper(self.save / "journal", folder / "segments")
        self._left = list(life.kills)
        self._rows_seen = 0
        self._moved_at = 0.0
        self._is_signalled = False
        self._num_fruitless = 0
        """Attempts in a row that ended without a kill; a second one would end like all further ones."""

    @property
    def run_dirs(self) -> list[Path]:
        """The run directories of the attempts, in order."""
        return [self.folder / f"run-{number}" for number in range(1, len(self.attempts) + 1)]

    @property
    def segments(self) -> Path:
        """The folder with all segments of the journal."""
        return self._keeper.folder

    def play(self) -> None:
        """Play the life to its end."""
        with self._stack:
            while len(self.attempts) < MOST_ATTEMPTS:
                self._attempt(len(self.attempts) + 1)
                if self.attempts[-1].code in (0, 2, None) or self._num_fruitless > 1:
                    break
        self._keeper.look()

    def state(self) -> Mapping[str, Any] | None:
        """Return the state of the run in its last checkpoint; None without one."""
        files = sorted(self.save.glob("iter_???????/run.json"))
        return orjson.loads(files[-1].read_bytes())["run"]["state"] if files else None

    @property
    def is_complete(self) -> bool:
        """Whether the last checkpoint is there: a run that is killed after it has no step left to resume."""
        state = self.state()
        return state is not None and state["step"] >= NUM_STEPS

    # ---- one attempt

    def _attempt(self, number: int) -> None:
        """Start the run, kill as drawn until the program has ended, and note what it left."""
        run_dir = self.folder / f"run-{number}"
        environment = {**holds.environment(self._hold, self.save), **COMPILED}
        run = Run(run_dir, f"{self.folder}-{number}", list(self._flags()), environment, self.folder)
        self._stack.callback(run.family.kill)
        began, self._rows_seen, self._moved_at = time.monotonic(), 0, time.monotonic()
        self._is_signalled, num_kills = False, len(self.blows)
        while self._left and self._comes(run, self._left[0], began, is_first=number == 1) and not self.is_complete:
            self._strike(run, self._left.pop(0))
        self._until(run, lambda: False)
        self._num_fruitless = 0 if len(self.blows) > num_kills else self._num_fruitless + 1
        fault_at = self.blows[-1].at if self.blows else None
        self.attempts.append(run.ended(fault_at, is_signalled=self._is_signalled))
        self._look(run)
        self._tell(f"attempt {number} ended with {'no progress' if run.code is None else f'code {run.code}'}")

    def _flags(self) -> Iterator[str]:
        variant = self.life.variant
        flags: dict[str, object] = {"config": CONFIGS[variant.model], **FLAGS, "save": self.save, "load": self.save}
        flags |= {"seed": 1234 + self.life.seed, "max-staleness": variant.staleness}
        if variant.is_partial:
            flags |= {"partial-rollout": True, "sglang-stream-interval": 4}
        if self.life.num_engines > 1:
            flags["rollout-num-gpus"] = self.life.num_engines
        for name, value in flags.items():
            yield from [f"--{name}"] if value is True else [f"--{name}", str(value)]

    # ---- the moment of a kill

    def _comes(self, run: Run, kill: Kill, began: float, *, is_first: bool) -> bool:
        """Wait for the moment of a kill; False if the program ended or hangs before."""
        if kill.moment == "start" and not is_first:
            return self._until(run, lambda: time.monotonic() >= began + kill.delay_s and self._victims(run, kill))
        if not self._until(run, lambda: _steps_done(run) >= kill.step):
            return False
        if kill.moment in ("update", "commit"):
            holds.arm(self._hold, holds.UPDATE if kill.moment == "update" else kill.rename)
            if not self._until(run, lambda: holds.is_reached(self._hold), HELD_S) and run.code is None:
                self.notes.append(f"no process came to the moment {kill.moment}")
            return run.code is None
        due = time.monotonic() + kill.delay_s
        return self._until(run, lambda: time.monotonic() >= due and self._victims(run, kill))

    def _victims(self, run: Run, kill: Kill) -> bool:
        return bool(run.victims(VICTIMS[kill.process]))

    def _strike(self, run: Run, kill: Kill) -> None:
        """Kill a process, and note where the journal ended."""
        victims = run.victims(VICTIMS[kill.process]) if run.code is None else []
        steps = _steps_done(run)
        try:
            if not victims:
                self.notes.append(f"there was no {kill.process} to kill")
                return
            mark = self._keeper.mark()
            at = time.time()
            victims[len(self.blows) % len(victims)].kill()
            if kill.process == "driver":
                self._is_signalled = True
                run.process.wait()
                mark = self._keeper.mark()
        finally:
            holds.release(self._hold)
        self._look(run)
        self.blows.append(Blow(process=kill.process, moment=kill.moment, steps=steps, at=at, mark=mark))
        self._tell(f"kill {len(self.blows)}: {kill.process} ({kill.moment}) after {steps} steps")

    def _until(self, run: Run, is_so: Callable[[], bool], timeout_s: float = HANG_S) -> bool:
        """Wait until ``is_so``; False if the program ended, or there was no step for ``timeout_s``."""
        began = time.monotonic()

        def is_over() -> bool:
            self._look(run)
            return (run.code is None and is_so()) or time.monotonic() - max(began, self._moved_at) > timeout_s

        return run.wait_until(is_over, 10 * timeout_s) and run.code is None and is_so()

    def _look(self, run: Run) -> None:
        """Note new steps, and keep the segments of the journal."""
        self._keeper.look()
        rows = run.num_steps()
        if rows > self._rows_seen:
            self._rows_seen, self._moved_at = rows, time.monotonic()
            for blow in self.blows:
                if blow.next_step_s is None:
                    blow.next_step_s = time.time() - blow.at


def _steps_done(run: Run) -> int:
    """Return the number of the run's steps that are done, those of earlier attempts included."""
    try:
        lines = (run.folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    whole = [line for line in lines[-2:] if line.endswith(b"\n")]
    return int(orjson.loads(whole[-1])["step"]) + 1 if whole else 0


def remove(folder: Path) -> None:
    """Remove the folder of a life."""
    shutil.rmtree(folder, ignore_errors=True)
