"""The checkpoints to save and to resume from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from asyncrl.config.areas.ranges import above, at_least, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """The checkpoints to save and to resume from."""

    save: Annotated[Path | None, "Folder for checkpoints. Default: none are written."] = None
    save_interval: Annotated[
        int | None, "Number of training steps between checkpoints; the last step is saved in any case."
    ] = None
    keep_checkpoints: Annotated[
        int | None,
        "Number of newest checkpoints to keep; older ones are deleted after a new one is complete. Default: all.",
    ] = None
    save_interval_minutes: Annotated[
        float | None,
        "Time between checkpoints, in minutes: one follows the training step in which it has passed. May be combined "
        "with --save-interval.",
    ] = None
    journal: Annotated[
        bool,
        "Record finished groups and taken batches in SAVE/journal, so that --load recovers them after a kill. Without "
        "effect unless --save is given.",
    ] = True
    async_save: Annotated[
        bool, "Continue training while a checkpoint is written; training waits only for the copy in host memory."
    ] = True
    save_optim: Annotated[bool, "Save the optimizer state. If off, a resumed run starts with a fresh one."] = True
    load: Annotated[
        Path | None,
        "Folder of checkpoints; training resumes from the newest. If there is none, training starts from the weights "
        "of --ref-load, and without it from --hf-checkpoint.",
    ] = None
    ckpt_step: Annotated[int | None, "Training step of the checkpoint to resume from. Default: the newest."] = None
    load_optim: Annotated[bool, "Load the optimizer state."] = True

    def __post_init__(self) -> None:
        refuse(
            at_least(self, 1, "save_interval", "keep_checkpoints", "ckpt_step")
            + above(self, 0, "save_interval_minutes")
        )
