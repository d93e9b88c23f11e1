"""The output of a run: its folder, the trackers Weights & Biases and trackio, and batches for debugging."""

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from asyncrl.config.areas.ranges import flag, must, refuse


@dataclass(frozen=True, slots=True)
class Secret:
    """A text that no output shows.  ``repr``, the resolved configuration and plug-ins do not contain it."""

    text: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """The output of a run."""

    run_dir: Annotated[
        Path | None,
        "Output folder. Default: runs/NAME-DATE-TIME, where NAME is the TOML file's or else the model folder's.",
    ] = None
    use_tensorboard: Annotated[bool, "Write TensorBoard events."] = True
    timeline: Annotated[bool, "Write timeline.json, a trace that Perfetto opens."] = True
    rollout_log_share: Annotated[
        float,
        "Share of the groups whose samples are written to rollouts/step-NUMBER.parquet, 0 to 1; 0 writes no files.",
    ] = 1.0
    page_port: Annotated[
        int | None,
        "Port of this machine on which a page in the browser shows the run; 0 chooses a free one. Default: no page. "
        "asyncrl page RUN_DIR shows it later.",
    ] = None
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

    def __post_init__(self) -> None:
        share = self.rollout_log_share
        port = self.page_port
        refuse(
            [
                *must(0 <= share <= 1, f"rollout-log-share must be between 0 and 1, got {share}"),
                *must(port is None or 0 <= port < 65_536, f"page-port must be between 0 and 65535, got {port}"),
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerConfig:
    """The trackers that receive the metrics, in addition to the files in the run directory."""

    use_wandb: Annotated[
        bool, "Send each step's metrics to Weights & Biases. Needs the extra asyncrl[wandb]; see docs/metrics.md."
    ] = False
    wandb_mode: Annotated[
        Literal["online", "offline", "disabled"] | None,
        "W&B mode: online uploads, offline only writes files, disabled does neither. Default: the environment "
        "variable WANDB_MODE, or else online.",
    ] = None
    wandb_dir: Annotated[Path | None, "Folder of W&B's local files. Default: the run directory."] = None
    wandb_key: Annotated[
        Secret | None,
        "W&B API key. Other users of the machine see command lines, so prefer wandb login or WANDB_API_KEY.",
    ] = None
    wandb_host: Annotated[str | None, "URL of a W&B server of one's own. Default: W&B's cloud."] = None
    wandb_team: Annotated[str | None, "W&B entity (team or user) that owns the run. Default: the key's user."] = None
    wandb_group: Annotated[str | None, "W&B group of the run. Default: NAME, as in --run-dir."] = None
    wandb_project: Annotated[str | None, "W&B project of the run. Default: uncategorized."] = None
    disable_wandb_random_suffix: Annotated[
        bool, "Use the group as it is given; otherwise the run's id is appended to it with an underscore."
    ] = False
    wandb_run_id: Annotated[
        str | None, "Id of a W&B run to continue, or the id of a new one. Default: eight random characters."
    ] = None
    use_trackio: Annotated[
        bool, "Send each step's metrics to trackio. Needs the extra asyncrl[trackio]; see docs/metrics.md."
    ] = False
    trackio_project: Annotated[str, "trackio project of the run."] = "asyncrl"
    trackio_name: Annotated[
        str | None, "Name of the trackio run; an existing run of this name continues. Default: NAME and random text."
    ] = None
    trackio_space_id: Annotated[
        str | None, "Hugging Face Space for trackio, as USER/NAME. Default: local files in trackio's folder."
    ] = None

    @property
    def sends_to_wandb(self) -> bool:
        """Whether rows are handed to W&B."""
        return self.use_wandb and self.wandb_mode != "disabled"


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """Debugging."""

    save_debug_rollout_data: Annotated[
        str | None, "File for the batch of each step, written before it is trained; {rollout_id} is the step's number."
    ] = None
    load_debug_rollout_data: Annotated[
        str | None,
        "Files of --save-debug-rollout-data to train on, instead of generating; {rollout_id} is the step's number. "
        "Implies --debug-train-only.",
    ] = None
    debug_rollout_only: Annotated[
        bool,
        "Start the engines alone, without a trainer: batches are generated and reported, and weights never change.",
    ] = False
    debug_train_only: Annotated[bool, "Start the trainer alone, without engines. Needs --load-debug-rollout-data."] = (
        False
    )

    def __post_init__(self) -> None:
        lines = []
        for name in ("save_debug_rollout_data", "load_debug_rollout_data"):
            lines += _pattern(name.replace("_", "-"), getattr(self, name))
        saved = self.save_debug_rollout_data
        lines += must(
            saved is None or bool(lines) or file_of_step(saved, 0) != file_of_step(saved, 1),
            f"save-debug-rollout-data {saved} is one file for all steps; give it {{rollout_id}}, the step's number",
        )
        lines += must(
            not self.debug_train_only or self.load_debug_rollout_data is not None,
            "debug-train-only without load-debug-rollout-data: there are no batches to train on",
        )
        others = ("debug_train_only", "load_debug_rollout_data") if self.debug_rollout_only else ()
        given = [name.replace("_", "-") for name in others if getattr(self, name)]
        lines += must(
            not given,
            f"debug-rollout-only with {' and '.join(given)}: one starts the engines alone, the other the trainer alone",
        )
        lines += must(
            self.load_debug_rollout_data is None or self.save_debug_rollout_data is None,
            "save-debug-rollout-data with load-debug-rollout-data: the batches are saved already",
        )
        refuse(lines)

    def file_to_load(self, step: int) -> Path:
        """Return the file of a step's batch.  Only with ``load_debug_rollout_data``."""
        assert self.load_debug_rollout_data is not None, "nothing is loaded"
        return file_of_step(self.load_debug_rollout_data, step)


def file_of_step(pattern: str, step: int) -> Path:
    """Return the file that ``pattern`` names for a step."""
    return Path(pattern.format(rollout_id=step))


def _pattern(setting: str, pattern: str | None) -> list[str]:
    if pattern is None:
        return []
    try:
        file_of_step(pattern, 0)
    except (LookupError, ValueError, AttributeError):
        return [f"{setting} {pattern!r}: only {{rollout_id}} may be in braces, as in debug/{{rollout_id}}.batch"]
    return []


def tracker_problems(trackers: TrackerConfig) -> list[str]:
    """One line for each tracker that has settings and is not used, and for each setting that W&B could not use."""
    lines = _folder(trackers.wandb_dir) + _server(trackers.wandb_host)
    for tracker in ("wandb", "trackio"):
        given = [
            flag(each.name)
            for each in fields(trackers)
            if tracker in each.name and each.name != f"use_{tracker}" and getattr(trackers, each.name) != each.default
        ]
        names = ", ".join(given)
        lines += must(
            getattr(trackers, f"use_{tracker}") or not given,
            f"{names} without use-{tracker}: nothing is sent to it; give use-{tracker} as well, or leave out {names}",
        )
    return lines


def _folder(path: Path | None) -> list[str]:
    if path is None:
        return []
    nearest = next(each for each in (path, *path.parents) if os.path.exists(each))
    return must(nearest.is_dir(), f"wandb-dir {path}: {nearest} is not a folder; give another path")


def _server(host: str | None) -> list[str]:
    return must(host is None or _is_url(host), f"wandb-host must be a URL, as https://wandb.example.com, got {host!r}")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and " " not in text and parts.port != 0
    except ValueError:  # a bracket or a port
        return False
