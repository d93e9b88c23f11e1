"""The settings that a journal depends on."""

from asyncrl.config import RunConfig
from asyncrl.config.resolved import kept

BINDING = (
    "rollout-batch-size",
    "n-samples-per-prompt",
    "max-staleness",
    "update-weights-interval",
    "global-batch-size",
    "num-steps-per-rollout",
)
"""Settings by which batches are cut and groups are dated; after a change of one, recorded groups have no place."""


def binding(run: RunConfig) -> dict[str, str]:
    """Return the settings that a journal depends on, as TOML values by name, and the first weights."""
    settings = {name: value for name, value in kept(run).items() if name in BINDING}
    return {**settings, "weights": (run.train.ref_load or run.model.hf_checkpoint).name}
