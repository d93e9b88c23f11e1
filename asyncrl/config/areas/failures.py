"""The limits on failures and waiting times."""

from dataclasses import dataclass
from typing import Annotated

from asyncrl.config.areas.ranges import above, at_least, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureConfig:
    """The limits on failures and waiting times."""

    max_sample_retries: Annotated[
        int, "Maximum number of retries of a sample whose engine failed; tokens generated so far are kept."
    ] = 3
    max_engine_restarts: Annotated[
        int | None,
        "Maximum number of engine restarts in the run, over all engines; a failed restart is retried and counts. The "
        "next failure ends the run. Default: 3, or 0 with --colocate.",
    ] = None
    max_failed_groups: Annotated[int, "Number of failed groups in a row that ends the run."] = 16
    max_filtered_groups: Annotated[int, "Number of filtered groups in a row that ends the run."] = 1024
    request_timeout_s: Annotated[float, "Time without a token after which a request times out, in seconds."] = 300.0
    control_timeout_s: Annotated[float, "Time limit for one engine pause, update or continue, in seconds."] = 120.0
    reward_timeout_s: Annotated[float, "Time limit for one call of the reward function, in seconds."] = 60.0
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
            at_least(self, 0, "max_sample_retries", "max_engine_restarts")
            + at_least(self, 1, "max_failed_groups", "max_filtered_groups")
            + above(self, 0, "request_timeout_s", "control_timeout_s", "reward_timeout_s", "train_timeout_s")
            + above(self, 0, "watchdog_timeout_s")
            + at_least(self, 0, "grace_s")
        )
