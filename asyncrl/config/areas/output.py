"""The output of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """The output of a run."""

    run_dir: Annotated[
        Path | None,
        "Output folder. Default: runs/NAME-DATE-TIME, where NAME is the TOML file's or else the model folder's.",
    ] = None
    use_tensorboard: Annotated[bool, "Write TensorBoard events."] = True
    timeline: Annotated[bool, "Write timeline.json, a trace that Perfetto opens."] = True
    progress: Annotated[
        Literal["auto", "live", "lines"],
        "Progress display: live redraws a table, lines prints one line per step. auto is live on a terminal, else "
        "lines.",
    ] = "auto"
    dry_run: Annotated[
        bool,
        "Start nothing: check every setting, show the run's memory per GPU, and refuse what cannot fit. Needs no GPU "
        "and, of the model, only config.json.",
    ] = False
