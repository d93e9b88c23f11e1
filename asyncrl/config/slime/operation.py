"""slime's flags of placement, weight updates, failures, reports and debugging."""

from collections.abc import Sequence

from asyncrl.config.slime.status import Rows, differs, not_here, true_anyway, without_effect

_DEBUG = "use --dry-run to check a run, or python -m benchmarks.trainer to run the trainer alone"
_METRICS = "every step is reported, with the metrics of docs/metrics.md"
_FULL = "every update sends all weights"

_PLACEMENT: Sequence[Rows] = (
    differs("default: 1, slime's is 8", "actor-num-gpus-per-node"),
    differs("default: 1, or the trainer's number with --colocate; slime requires it without", "rollout-num-gpus"),
    true_anyway("--colocate moves both sides to host memory", "offload", "offload-train", "offload-rollout"),
    true_anyway("without --colocate nothing is moved to host memory", "no-offload-train", "no-offload-rollout"),
    without_effect("sglang-router stands in front of the engines", "use-slime-router", words="none"),
    without_effect("Ray reports the number of GPUs of each node", "num-gpus-per-node"),
    true_anyway("trainer ranks talk over nccl on GPUs", "distributed-backend", words="one", accepted=("nccl",)),
    not_here("set the environment variables before ray start", "train-env-vars"),
    not_here("the run starts its engines", "rollout-external-engine-addrs"),
    not_here("an engine does prefill and decode", "prefill-num-servers"),
)

_BATCHES: Sequence[Rows] = (
    differs("on by default, with 8,192 tokens", "use-dynamic-batch-size", "max-tokens-per-gpu"),
)

_UPDATES: Sequence[Rows] = (
    true_anyway(_FULL, "update-weight-mode", words="one", accepted=("full",)),
    not_here(
        _FULL,
        "update-weight-delta-encoding",
        "update-weight-delta-checksum",
        "update-weight-local-checkpoint-dir",
        "custom-update-weight-post-write-path",
    ),
    not_here("files are deleted as soon as all engines have the next version", "update-weight-disk-keep-files"),
    not_here("use --check-weight-updates", "check-weight-update-equal"),
)

_FAILURES: Sequence[Rows] = (
    true_anyway("engines restart, at most --max-engine-restarts times an hour each", "use-fault-tolerance"),
    without_effect(
        "a server that ended is noticed within half a second, and --request-timeout-s limits the silence of others",
        "rollout-health-check-interval",
        "rollout-health-check-timeout",
        "rollout-health-check-first-wait",
    ),
)

_REPORTS: Sequence[Rows] = (
    differs("on by default; the events are in the run directory", "use-tensorboard"),
    true_anyway("W&B's step is the training step", "wandb-always-use-train-step"),
    not_here("use --run-dir, which has the events", "tb-project-name", "tb-experiment-name", "tensorboard-dir"),
    without_effect(
        _METRICS,
        "log-throughput",
        "log-params-norm",
        "log-num-zeros-in-grad",
        "log-progress",
        "log-timers-to-tensorboard",
        "log-memory-to-tensorboard",
        "log-validation-ppl-to-tensorboard",
        "log-world-size-to-tensorboard",
        "moe-per-layer-logging",
        words="none",
    ),
    without_effect(_METRICS, "log-interval", "timing-log-level", "tensorboard-log-interval", "tensorboard-queue-size"),
    not_here("use --wandb-group", "wandb-exp-name"),
    not_here("use --wandb-dir", "wandb-save-dir"),
    without_effect(
        "evaluations report pass@k; of training batches, only the rewards are reported", "log-passrate", words="none"
    ),
    not_here(
        "use metrics.jsonl in the run directory, or --custom-rollout-log-function-path",
        "log-reward-category",
        "log-correct-samples",
    ),
)

_DEBUGGING: Sequence[Rows] = (
    differs(
        "the files are asyncrl's; those of torch.save are not read",
        "save-debug-rollout-data",
        "load-debug-rollout-data",
    ),
    not_here(
        _DEBUG,
        "load-debug-rollout-data-subsample",
        "load-forge-rollout-data",
        "save-debug-train-data",
        "dump-details",
    ),
    not_here(
        "use --timeline, and --dry-run for the memory per GPU",
        "memory-snapshot-dir",
        "memory-snapshot-num-steps",
        "memory-recorder",
        "record-memory-history",
        "profile-target",
        "profile",
        "profile-step-start",
        "profile-step-end",
        "profile-ranks",
        "use-pytorch-profiler",
    ),
    not_here(
        "slime's own tests need it",
        "ci-test",
        "ci-disable-kl-checker",
        "ci-train-rollout-logprob-abs-diff-threshold",
        "ci-save-grad-norm",
        "ci-load-grad-norm",
    ),
)

OPERATION: Rows = tuple(
    row for part in (_PLACEMENT, _BATCHES, _UPDATES, _FAILURES, _REPORTS, _DEBUGGING) for rows in part for row in rows
)
