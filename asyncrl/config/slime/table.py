"""The table of all flags that are not simply settings of a run, by flag name."""

from collections.abc import Mapping

from asyncrl.config.slime.generation import GENERATION
from asyncrl.config.slime.model import MODEL
from asyncrl.config.slime.operation import OPERATION
from asyncrl.config.slime.status import FlagStatus, Rows
from asyncrl.config.slime.training import TRAINING

SECTIONS: Mapping[str, Rows] = {
    "Model": MODEL,
    "Training": TRAINING,
    "Data and generation": GENERATION,
    "Operation": OPERATION,
}
"""The rows by the heading under which docs/slime.md lists them."""

TABLE: Mapping[str, FlagStatus] = {row.name: row for rows in SECTIONS.values() for row in rows}

BEING_ADDED = frozenset(
    {
        "recompute-activations",
        "lr-decay-style",
        "lr-decay-iters",
        "min-lr",
        "lr-warmup-fraction",
        "apply-chat-template-kwargs",
        "tool-key",
        "streaming-data",
        "num-data-workers",
        "rm-url",
        "reward-key",
        "eval-reward-key",
        "group-rm",
        "eval-config",
        "eval-top-p",
        "eval-top-k",
        "eval-min-new-tokens",
        "eval-function-path",
        "eval-input-key",
        "eval-label-key",
        "eval-tool-key",
        "eval-max-prompt-len",
        "data-source-path",
        "rollout-sample-filter-path",
        "rollout-all-samples-process-path",
        "custom-rollout-log-function-path",
        "custom-eval-rollout-log-function-path",
        "custom-convert-samples-to-train-data-path",
        "custom-reward-post-process-path",
        "use-wandb",
        "wandb-mode",
        "wandb-dir",
        "wandb-key",
        "wandb-host",
        "wandb-team",
        "wandb-group",
        "wandb-project",
        "wandb-run-id",
        "disable-wandb-random-suffix",
    }
)
"""Flags of slime that become settings in changes that are not merged yet."""
