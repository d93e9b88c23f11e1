"""A made-up timeline: steps of samples, as a run would write it, in virtual seconds."""

from pathlib import Path

from asyncrl.metrics.timeline import PART_BYTES, TIMELINE_FILE, TimelineFile, parts_of

STEP_S = 10.0
TRAIN_S = 4.0
UPDATE_S = 0.5
SLOTS = 64


def write_timeline(
    run_dir: Path, *, steps: int, samples_per_step: int = SLOTS, close: bool = True, part_bytes: int = PART_BYTES
) -> None:
    """Write steps of ten seconds: 5 s wait, 4 s training, 0.2 s copying, then an update of 0.5 s.

    Samples fill the slots from the update to the end of the training; every tenth step evaluates for 2 s.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    file = TimelineFile(run_dir, 0.0, part_bytes=part_bytes)
    for step in range(steps):
        _write_step(file, step, step * STEP_S, samples_per_step)
    file.close()
    if not close:  # a run that was killed leaves the bracket open
        newest = [path for path in parts_of(run_dir / TIMELINE_FILE) if path.exists()][-1]
        newest.write_bytes(newest.read_bytes().removesuffix(b"\n]\n"))


def _write_step(file: TimelineFile, step: int, at: float, num_samples: int) -> None:
    file.span("trainer", "wait for a batch", at, at + 5.0)
    rounds = -(-num_samples // SLOTS)
    length = (9.2 - UPDATE_S) / rounds
    for number in range(num_samples):
        begun = at + UPDATE_S + (number // SLOTS) * length
        name = f"g{step * num_samples // 8 + number // 8}.{number % 8}"
        file.sample(number % SLOTS, name, begun, begun + length, tokens=100 + number, version=step, finish="stop")
    file.span("trainer", f"step {step}", at + 5.0, at + 5.0 + TRAIN_S, tokens=num_samples * 100)
    file.span("trainer", "weights taken", at + 9.0, at + 9.2)
    file.span("engines", f"update to version {step + 1}", at + 9.5, at + 9.5 + UPDATE_S, bytes=1_000_000)
    if step % 10 == 0:
        file.sample(SLOTS, f"eval-{step}-set-0.0", at + 1, at + 3, tokens=20, version=step, finish="stop")
        file.span("evaluation", f"version {step}", at + 1, at + 3)
