"""A run of trackio.  This module runs in the tracker's process only.  It was written for trackio 0.43."""

from typing import Any


class TrackioRun:
    """One trackio run: held-out metrics have the step of the evaluated weights, all others the step of their row."""

    def __init__(self, **init: Any) -> None:
        """``init`` are arguments of ``trackio.init``."""
        self._init = init
        self._run: Any = None

    def open(self) -> str:
        """Begin the run, and return where it is stored.  Raises whatever ``trackio.init`` raises."""
        import trackio

        self._run = trackio.init(embed=False, **self._init)
        space, project = self._init["space_id"], self._init["project"]
        return f"Space {space}" if space else f'to see the run: trackio show --project "{project}"'

    def log(self, row: dict[str, float], /) -> None:
        """Send one row."""
        held_out = {name: value for name, value in row.items() if name.startswith("eval/")}
        others = {name: value for name, value in row.items() if name != "step" and name not in held_out}
        self._run.log(others, step=int(row["step"]))
        if held_out:
            self._run.log(held_out, step=int(row.get("eval/step", row["step"])))

    def finish(self) -> None:
        """Wait until trackio has stored or uploaded all rows."""
        self._run.finish()
