"""One life: processes that end and resume on one disk, until all steps are trained or an oracle does not hold."""

import contextlib
import errno
import gc
import random
import shutil
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrl import mischief
from asyncrl.engines.megatron.checkpoint.checksums import check_files
from asyncrl.engines.megatron.checkpoint.directory import latest, read_notes
from asyncrl.engines.megatron.checkpoint.lease import Claim, release, take
from asyncrl.engines.megatron.checkpoint.writes import fence
from asyncrl.errors import AsyncRLError, ConfigError, JournalDamaged, Stalled
from asyncrl.pipeline.recovery import JOURNAL_FOLDER, Recovery, recovery
from asyncrl.pipeline.scheduling.quarantine import FailedRow, Quarantine
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.sim.clock import Deadlock
from asyncrl.sim.faults.history import History
from asyncrl.sim.faults.journal import SlowDisk
from asyncrl.sim.faults.loop import Killed, LifeLoop, run_life
from asyncrl.sim.faults.process import Found, Process, notes_of
from asyncrl.sim.faults.world.plan import CALM_S, Fault, Setting, Weather, is_survived
from asyncrl.sim.faults.world.trainer import read_step
from asyncrl.sim.faults.world.users import Prompts
from asyncrl.sim.faults.world.violation import Violation
from asyncrl.sim.faults.world.witness import Saved

BOUND_S = 3000.0
"""Virtual seconds after the last fault within which all steps must be trained."""


class TooLong(KeyboardInterrupt):
    """The life has not ended within BOUND_S after its last fault."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of one life."""

    violation: Violation | None
    happened: Counter[str]
    num_processes: int
    ends: list[str]
    """The end of each process."""
    num_recovered: int
    """Processes that recovered from a journal."""
    seconds: float
    """Virtual seconds."""
    lines: list[str] = field(default_factory=list)
    """Events, if they were asked for."""


class Life:
    """One life, which ``run`` runs once."""

    def __init__(self, setting: Setting, faults: Sequence[Fault], folder: Path, *, is_traced: bool = False) -> None:
        """``folder`` exists and is empty: the disk of the life."""
        self._setting = setting
        self._faults = sorted(faults, key=lambda fault: fault.at)
        self._folder = folder
        self._is_traced = is_traced
        self.lines = list[str]()
        self._loop = LifeLoop()
        self._before_s = 0.0
        self._weather = Weather(setting.num_engines, self._now, self._note)
        self._saved = defaultdict[int, list[Saved]](list)
        self._rows = dict[tuple[int, str], FailedRow]()
        self._ends = list[str]()
        self._disk_countdown: int | None = None
        self._begun = set[int]()
        """Numbers of the faults that have begun: one that ends a process at once does not meet the next one too."""
        self._history = History()
        self._rng = random.Random(setting.disk_seed)
        self.num_recovered = 0
        """Processes that recovered from a journal."""

    def run(self) -> Outcome:
        """Live to the end, and return what was found."""
        violation = None
        random.seed(1)  # asyncrl.outages draws its jitter from the global generator
        (self._folder / "save").mkdir()
        try:
            while not self._is_complete():
                self._one_process()
        except Violation as error:
            violation = error
        except Exception as error:  # noqa: BLE001 (the hunt continues, and tells the seed)
            violation = Violation("no bug", f"between two processes: {type(error).__name__}: {error}")
        self._loop.close()
        return Outcome(
            violation=violation,
            happened=self._weather.happened,
            num_processes=len(self._ends),
            ends=self._ends,
            num_recovered=self.num_recovered,
            seconds=self._before_s,
            lines=self.lines,
        )

    def _is_complete(self) -> bool:
        return bool(self._ends) and self._ends[-1] == "done"

    # ---- one process

    def _one_process(self) -> None:
        claim = take(self._folder / "save", self._note)
        fence(claim)
        origin, before = self._origin()
        if before is not None and before.state.step >= self._setting.num_steps:
            self._ends.append("done")
            return
        before, found = self._recovered(before)
        self._loop.close()
        self._loop = LifeLoop()
        self._loop.turn_s = self._setting.turn_s
        process = self._process(claim, origin, before, found)
        self._schedule(process)
        end = self._lived(process)
        release(claim)
        self._check_saved(process, end)
        self._note(f"END of process {len(self._ends)}: {end}")
        self._ends.append(end)
        if end.startswith("error") and not self._may_fail(process):
            raise Violation("no error without a fault", end)

    def _may_fail(self, process: Process) -> bool:
        """Return whether a process may have ended with an error: before the calm, and by a fault that may end a run."""
        is_training = process.early_end.is_possible
        return self._began_s < CALM_S and not (
            is_training and is_survived(self._setting, self._weather.happened.keys())
        )

    def _check_saved(self, process: Process, end: str) -> None:
        """Check that a run which ended well has left the checkpoint that it promised."""
        promised = self._setting.num_steps if end == "done" else process.early_end.saved_step
        if promised is not None and end in ("done", "early end"):
            folder, _ = self._origin()
            if folder is None or read_step(folder) != promised:
                raise Violation("the latest checkpoint is complete", f"{end}, but step {promised} is not saved")

    def _recovered(self, before: Saved | None) -> tuple[Saved | None, Found | None]:
        """Return the start of the next process: from the journal, or else from the checkpoint alone."""
        if not self._setting.has_journal:
            return before, None
        state, prompts = before.state if before else None, Prompts(self._setting.rows)
        folder, notes = self._folder / "save" / JOURNAL_FOLDER, notes_of(self._setting)
        try:
            found = recovery(folder, state, notes, prompts.at, num_steps=self._setting.num_steps)
        except ConfigError as error:
            raise Violation("the journal can be read", str(error)) from error
        except Exception as error:
            raise Violation("no bug", f"in a recovery: {type(error).__name__}: {error}") from error
        expected = self._history.expected(*((state.step, state.mark) if state else (0, "")))
        if isinstance(found, Recovery) is not (expected is not None):
            raise Violation("recovered accounts", f"the journal has {expected}, and the recovery {found}")
        if not isinstance(found, Recovery) or expected is None:
            self._note(f"no recovery: {found}")
            self._history.forget()
            return before, None
        self._note(found.words)
        self.num_recovered += 1
        start = Saved(found.before, expected.settled, expected.accounts[0].generated)
        return start, Found(restored=found.restored, again=found.again, expected=expected)

    def _process(self, claim: Claim, origin: Path | None, before: Saved | None, found: Found | None) -> Process:
        quarantine = Quarantine(
            self._setting.max_row_failures,
            list(self._rows.values()),
            lambda row: self._rows.update({(row.row, row.digest): row}),
        )
        return Process(
            setting=self._setting,
            weather=self._weather,
            claim=claim,
            weights_folder=self._folder / f"weights-{len(self._ends)}",
            quarantine=quarantine,
            before=before,
            note=self._note,
            origin=origin,
            found=found,
            disk=SlowDisk(self._weather, self._rng, self._setting.sync_s) if self._setting.has_journal else None,
        )

    def _lived(self, process: Process) -> str:
        """Run a process, and return how it ended.  Raises Violation."""
        self._began_s = self._before_s
        loop = self._loop
        try:
            with mischief.installed(self._at_point):
                run_life(loop, process.main())
            end = "done" if process.is_done else "early end"
        except Killed:
            end = "killed"
        except TooLong:
            raise Violation("progress", f"not done {BOUND_S:g} s after the last fault") from None
        except Deadlock as error:
            raise Violation("progress", f"every task waits for ever, {error}") from error
        except Stalled as error:
            raise Violation("progress", str(error)) from error
        except AsyncRLError as error:
            end = f"error {type(error).__name__}: {error}"
        except Violation:
            raise
        except Exception as error:
            raise Violation("no bug", f"{type(error).__name__}: {error}") from error
        finally:
            self._close(process)
        if loop.complaints and end != "killed":
            raise Violation("no unhandled error", loop.complaints[0])
        return end

    def _close(self, process: Process) -> None:
        for step, saved in process.witness.saved.items():
            self._saved[step].append(saved)
        self._loop.drop()
        self._before_s += self._loop.time()
        if (journal := process.journal) is not None:
            journal.end()
            try:
                self._history.survive(
                    process.scheduler.recording.entries,
                    self._folder / "save" / JOURNAL_FOLDER,
                    journal.run_epoch,
                    journal.num_durable,
                    process.witness.num_delivered,
                )
            except JournalDamaged as error:
                raise Violation("the journal can be read", str(error)) from error

    # ---- faults

    def _now(self) -> float:
        return self._before_s + (0.0 if self._loop.is_closed() else self._loop.time())

    def _schedule(self, process: Process) -> None:
        """Set the timers of the faults that are still to come."""
        loop, before_s = self._loop, self._before_s
        for fault in self._faults:
            if fault.at >= before_s and fault.number not in self._begun:
                loop.call_at(fault.at - before_s, self._begin, fault, process)
        if before_s >= CALM_S:
            self._calm()  # at once: the first commands of the process come before any timer
        else:
            loop.call_at(CALM_S - before_s, self._calm)
        loop.call_at(max(0.0, CALM_S - before_s) + BOUND_S, _too_long)

    def _calm(self) -> None:
        self._weather.clear()
        self._disk_countdown = None

    def _begin(self, fault: Fault, process: Process) -> None:
        self._begun.add(fault.number)
        act: dict[str, Callable[[Fault, Process], None]] = {
            "kill": self._kill,
            "kill_on_disk": self._kill_on_disk,
            "die": self._die,
            "scheduler_dies": self._end_scheduler,
            "machine_vanishes": self._vanish,
            "router_dies": self._end_router,
            "trainer_dies": self._end_trainer,
            "sigterm": self._end_early,
            "clock_jump": self._jump_clock,
            "blocked_loop": self._block,
        }
        act.get(fault.kind, self._arm)(fault, process)

    def _arm(self, fault: Fault, process: Process) -> None:
        self._weather.begin(fault)

    def _kill(self, fault: Fault, process: Process) -> None:
        self._weather.count(fault)
        self._loop.kill_after(int(fault.amount * 100))

    def _kill_on_disk(self, fault: Fault, process: Process) -> None:
        self._weather.begin(fault)
        self._disk_countdown = int(fault.amount * 12)

    def _die(self, fault: Fault, process: Process) -> None:
        engine = process.engines[fault.where % len(process.engines)]
        if engine.is_up:
            self._weather.count(fault)
            engine.die()

    def _end_scheduler(self, fault: Fault, process: Process) -> None:
        engine = process.engines[fault.where % len(process.engines)]
        if engine.is_up and engine.has_scheduler:
            self._weather.count(fault)
            engine.lose_scheduler()

    def _vanish(self, fault: Fault, process: Process) -> None:
        engine = process.engines[fault.where % len(process.engines)]
        if engine.is_up:
            self._weather.count(fault)
            engine.vanish()

    def _end_router(self, fault: Fault, process: Process) -> None:
        if process.router.is_up:
            self._weather.count(fault)
            process.router.die()

    def _end_trainer(self, fault: Fault, process: Process) -> None:
        trainer = process.trainer
        if trainer is not None and not trainer.died.is_set():
            self._weather.count(fault)
            trainer.die()

    def _end_early(self, fault: Fault, process: Process) -> None:
        if process.early_end.ask("SIGTERM", 10.0):
            self._weather.count(fault)

    def _jump_clock(self, fault: Fault, process: Process) -> None:
        self._weather.count(fault)
        self._loop.jump(fault.amount * 100)

    def _block(self, fault: Fault, process: Process) -> None:
        self._weather.count(fault)
        self._loop.jump(fault.amount * 4)

    def _at_point(self, name: str) -> None:
        """Act at a point of the real code: the disk is full, or the process ends."""
        if self._disk_countdown is not None:
            self._disk_countdown -= 1
            if self._disk_countdown < 0:
                self._disk_countdown = None
                if self._weather.take("kill_on_disk"):
                    self._note(f"killed at: {name}")
                    raise Killed
        if self._weather.take("disk_full"):
            raise OSError(errno.ENOSPC, "No space left on device")

    # ---- the disk

    def _origin(self) -> tuple[Path | None, Saved | None]:
        """Return the checkpoint to resume from.  Raises Violation if it is torn, or not what was saved."""
        try:
            folder = latest(self._folder / "save")
            if folder is None:
                return None, None
            check_files(folder)
            notes = read_notes(folder)
        except (AsyncRLError, ConfigError) as error:
            raise Violation("the latest checkpoint is complete", str(error)) from error
        if notes is None:
            raise Violation("the latest checkpoint is complete", f"{folder} has no notes")
        return folder, self._found(folder, notes["run"]["state"])

    def _found(self, folder: Path, found: Any) -> Saved:
        step = read_step(folder)
        for saved in reversed(self._saved[step]):
            if saved.is_found(found):
                self._note(f"resume from {folder.name}: {saved.state.prompts_taken} prompts taken")
                return replace(saved, state=RunState.from_json(found))
        raise Violation("resumed state is the saved state", f"{folder.name} has {found}")

    def _note(self, line: str) -> None:
        if self._is_traced:
            self.lines.append(f"{self._now():9.3f}  {line}")


def _too_long() -> None:
    raise TooLong


def live(setting: Setting, faults: Sequence[Fault], scratch: Path, *, is_traced: bool = False) -> Outcome:
    """Live one life, with a folder in ``scratch`` as its disk."""
    folder = scratch / "life"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with _quiet():
        outcome = Life(setting, faults, folder, is_traced=is_traced).run()
        if outcome.violation is not None or "killed" in outcome.ends:
            gc.collect()
    return outcome


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ignore what Python says about coroutines that a killed process has left in the middle."""
    before = sys.unraisablehook
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        sys.unraisablehook = lambda _: None
        try:
            yield
        finally:
            sys.unraisablehook = before
