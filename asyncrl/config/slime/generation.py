"""slime's flags of data, generation, rewards and evaluation."""

from collections.abc import Sequence

from asyncrl.config.slime.status import Rows, differs, not_here, true_anyway, without_effect

_BUFFER = "the buffer is in the driver process; use --buffer-filter-path to choose from it"

_DATA: Sequence[Rows] = (
    without_effect("--num-rollout counts the training steps: num-epoch x prompts // rollout-batch-size", "num-epoch"),
    not_here("use --data-source-path, whose class owns its data", "disable-rollout-global-dataset"),
    not_here("prompts are text", "multimodal-keys"),
    without_effect("the tokenizer is that of --hf-checkpoint", "tokenizer-type", "tokenizer-model"),
    not_here("use --prompt-data", "data-path"),
    not_here("use --eval-prompt-data", "split", "eval-iters"),
)

_ROLLOUT: Sequence[Rows] = (
    differs("default: 1,024 tokens, slime has none", "rollout-max-response-len"),
    differs("limits the groups in flight; slime starts this many at a time", "over-sampling-batch-size"),
    differs("masks resumed tokens older than max-staleness; slime trains all of them", "partial-rollout"),
    differs("picks from finished groups; slime's buffer has unfinished ones", "buffer-filter-path"),
    true_anyway(
        "the rollout loop is fixed",
        "rollout-function-path",
        words="one",
        accepted=("slime.rollout.sglang_rollout.generate_rollout",),
    ),
    true_anyway("every run with episodes reports them", "log-multi-turn"),
    not_here("name the type in your function: MultiTurnLossMaskGenerator(tokenizer, tokenizer_type)", "loss-mask-type"),
    not_here("use --rollout-all-samples-process-path or --custom-rm-path", "rollout-sample-hook-path"),
    not_here("use --custom-convert-samples-to-train-data-path", "rollout-data-postprocess-path"),
    not_here(
        _BUFFER,
        "rollout-buffer-url",
        "fetch-trajectory-retry-times",
        "min-batch-collection-ratio",
        "rollout-task-type",
    ),
    without_effect(
        "--rollout-max-context-len limits evaluations as well; functions of slime's shape see the value in args",
        "eval-max-context-len",
    ),
    without_effect("samples travel through Ray's object store", "rollout-data-transport"),
    without_effect("requests leave from one event loop", "use-distributed-post", words="none"),
    not_here("requests go to the engines directly, without a proxy", "http-proxy"),
)

GENERATION: Rows = tuple(row for part in (_DATA, _ROLLOUT) for rows in part for row in rows)
