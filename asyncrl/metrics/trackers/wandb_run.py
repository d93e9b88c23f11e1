"""A run of Weights & Biases.  This module runs in the tracker's process only.  It was written for wandb 0.31."""

from typing import Any


class WandbRun:
    """One W&B run, whose metrics are drawn over the training step, and held-out metrics over ``eval/step``."""

    def __init__(self, *, key: str | None, host: str | None, mode: str | None, driver: int, **init: Any) -> None:
        """``init`` are arguments of ``wandb.init``; ``driver`` is the process whose resources W&B reports."""
        self._init = init
        # The key is a setting, not a login: ``wandb.login`` would write it to ~/.netrc.
        given: dict[str, Any] = {"api_key": key, "base_url": host, "mode": mode}
        self._settings = {name: value for name, value in given.items() if value is not None}
        self._settings |= {"console": "off", "x_stats_pid": driver}
        self._run: Any = None
        self._defined: set[str] = set()

    def open(self) -> str:
        """Begin the run, and return its page or its local folder.  Raises whatever ``wandb.init`` raises."""
        import wandb

        self._run = wandb.init(settings=wandb.Settings(**self._settings), **self._init)
        place = self._run.url or f"run {self._run.id}, local files in {self._run.dir}"
        return str(place)

    def log(self, row: dict[str, float], /) -> None:
        """Add one row to the run's history."""
        for name in row.keys() - self._defined:
            self._define(name)
        self._run.log(row)

    def finish(self) -> None:
        """Wait until W&B has written or uploaded all rows.

        ``finish`` returns before W&B's own process has written the last rows of an offline run; its end is the proof.
        """
        import wandb

        self._run.finish()
        wandb.teardown()

    def _define(self, name: str) -> None:
        """Draw ``name`` over its step.  Patterns would overlap, and W&B does not document which of two wins.

        A name with an asterisk would be a pattern, so W&B draws it over its own step.
        """
        axis = "eval/step" if name.startswith("eval/") else "step"
        if "*" not in name:
            self._run.define_metric(name, step_metric=None if name == axis else axis)
        self._defined.add(name)
