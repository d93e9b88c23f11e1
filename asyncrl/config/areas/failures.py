"""The limits on failures and waiting times."""

from dataclasses import dataclass
from typing import Annotated

from asyncrl.config.areas.ranges import above, at_least, must, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureConfig:
    """The limits on failures and waiting times."""

    max_sample_retries: Annotated[
        int, "Maximum number of retries of a sample whose engine failed; tokens generated so far are kept."
    ] = 3
    max_engine_restarts: Annotated[
        int | None,
        "Maximum number of restarts of one engine within an hour; a failed start counts. Without one left, the run "
        "continues with the other engines until one is an hour old. Default: 3, or 0 with --colocate, where every "
        "engine is needed.",
    ] = None
    max_trainer_restarts: Annotated[
        int | None,
        "Maximum number of restarts of a dead or unresponsive trainer between two completed steps; a failed restart "
        "counts. With 0, the run ends with it. Default: 3 with --save and a journal, else 0; 0 with --colocate.",
    ] = None
    slow_engine_share: Annotated[
        float,
        "Share of the engines' median decoding speed below which an engine is drained and restarted. It needs three "
        "engines. With 0, none is.",
    ] = 0.5
    max_failed_groups: Annotated[int, "Number of failed groups in a row that ends the run."] = 16
    max_failed_saves: Annotated[
        int, "Number of failed checkpoints in a row that ends the run; a failed last checkpoint ends it with an error."
    ] = 3
    max_row_failures: Annotated[
        int,
        "Number of failures of a row, over all epochs and resumed runs, after which the row is left out. With 0, no "
        "row is.",
    ] = 3
    max_filtered_groups: Annotated[int, "Number of filtered groups in a row that ends the run."] = 1024
    skip_nonfinite_steps: Annotated[
        int,
        "Number of batches in a row that are skipped because their loss or gradient norm is not finite; the next one "
        "ends the run. The first step is never skipped.",
    ] = 1
    request_timeout_s: Annotated[float, "Time without a token after which a request times out, in seconds."] = 300.0
    control_timeout_s: Annotated[float, "Time limit for one engine pause, update or continue, in seconds."] = 120.0
    reward_timeout_s: Annotated[float, "Time limit for one call of the reward function, in seconds."] = 60.0
    reward_outage_s: Annotated[
        float,
        "Time for which a run waits while every call to the rewards' service fails, in seconds; then it writes a "
        "checkpoint and ends. With 0, no outage is waited out.",
    ] = 1800.0
    train_timeout_s: Annotated[float, "Time limit for one training step or save, in seconds."] = 3600.0
    grace_s: Annotated[
        float,
        "Time after SIGTERM in which a run with --save may finish its step and write a checkpoint, in seconds; 0 ends "
        "the run at once.",
    ] = 15.0
    watchdog_timeout_s: Annotated[
        float, "Time without a token or group after which a run whose trainer waits ends, in seconds."
    ] = 1800.0

    def __post_init__(self) -> None:
        refuse(
            at_least(self, 0, "max_sample_retries", "max_engine_restarts", "max_trainer_restarts")
            + at_least(self, 1, "max_failed_groups", "max_failed_saves", "max_filtered_groups")
            + above(self, 0, "request_timeout_s", "control_timeout_s", "reward_timeout_s", "train_timeout_s")
            + above(self, 0, "watchdog_timeout_s")
            + at_least(self, 0, "reward_outage_s", "max_row_failures", "skip_nonfinite_steps", "grace_s")
            + must(
                0 <= self.slow_engine_share < 1,
                f"slow-engine-share must be at least 0 and below 1, got {self.slow_engine_share}",
            )
        )
