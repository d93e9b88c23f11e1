"""The flags of the trainer: Megatron's, and slime's for objective, weights and checkpoints."""

from collections.abc import Sequence

from asyncrl.config.slime.status import Rows, differs, not_here, true_anyway, without_effect

_OPTIMIZER: Sequence[Rows] = (
    true_anyway("the optimizer is AdamW", "optimizer", words="one", accepted=("adam", "adamw")),
    true_anyway("AdamW's moments and main weights are float32", "use-precision-aware-optimizer"),
    true_anyway(
        "AdamW's moments and main weights are float32",
        "main-params-dtype",
        "exp-avg-dtype",
        "exp-avg-sq-dtype",
        words="one",
        accepted=("fp32",),
    ),
    differs("default: 0.98, Megatron's is 0.999", "adam-beta2"),
    differs("default: constant, Megatron's is linear, which falls to --min-lr", "lr-decay-style"),
    not_here("use --num-rollout", "train-iters", "train-samples"),
    not_here(
        "the optimizer stays on GPUs: use more of them with --use-distributed-optimizer, or --colocate, which moves "
        "it to host memory during generation",
        "optimizer-cpu-offload",
        "overlap-cpu-optimizer-d2h-h2d",
    ),
    not_here("the optimizer keeps its moments over the whole run", "reset-optimizer-states", "use-stateless-adam"),
    not_here(
        "every weight is trained; use --custom-loss-function-path for another loss",
        "only-train-params-name-list",
        "freeze-params-name-list",
    ),
    not_here("use --critic-load, --critic-lr and --critic-lr-warmup-iters for the critic", "megatron-config-path"),
)

_NUMBERS: Sequence[Rows] = (
    true_anyway("there is no dropout", "attention-dropout", "hidden-dropout", words="one", accepted=("0",)),
    true_anyway("the softmax of attention is float32", "attention-softmax-in-fp32"),
    true_anyway(
        "attention runs in torch's kernels for packed sequences",
        "attention-backend",
        words="one",
        accepted=("flash", "auto"),
    ),
    true_anyway("attention runs in torch's kernels for packed sequences", "use-flash-attn"),
    true_anyway("gradients accumulate in float32", "accumulate-allreduce-grads-in-fp32"),
    true_anyway("gradients accumulate in float32", "main-grads-dtype", words="one", accepted=("fp32",)),
    without_effect("gradients are summed over ranks in float32", "grad-reduce-in-bf16", words="none"),
    true_anyway("sets --dtype bfloat16, the default on GPUs", "bf16"),
    true_anyway(
        "the fusion is off",
        "no-rope-fusion",
        "no-bias-swiglu-fusion",
        "no-gradient-accumulation-fusion",
        "no-masked-softmax-fusion",
        "no-bias-gelu-fusion",
        "no-bias-dropout-fusion",
    ),
    not_here("use --dtype bfloat16 or --dtype float32", "fp16"),
    not_here(
        "the trainer computes in bfloat16; engines serve fp8 if --hf-checkpoint has it",
        "fp8-format",
        "fp8-recipe",
        "fp8-param-gather",
        "megatron-deepgemm-forward-layers",
        "megatron-deepgemm-forward-modules",
        "megatron-deepgemm-moe-forward-layers",
        "megatron-deepgemm-moe-forward-modules",
    ),
    not_here(
        "the trainer's kernels need not be deterministic; use --seed for repeatable sampling", "deterministic-mode"
    ),
)

_EXPERTS: Sequence[Rows] = (
    true_anyway("experts run as a grouped GEMM", "moe-grouped-gemm"),
    true_anyway("the router computes in float32", "moe-router-dtype", words="one", accepted=("fp32",)),
    true_anyway("the bias of the choice is not updated", "moe-router-bias-update-rate", words="one", accepted=("0",)),
    true_anyway("there is no load-balancing loss", "moe-aux-loss-coeff", words="one", accepted=("0",)),
    true_anyway("there is no z-loss", "moe-z-loss-coeff", words="one", accepted=("0",)),
    true_anyway(
        "there is no load-balancing loss",
        "moe-router-load-balancing-type",
        words="one",
        accepted=("none", "aux_loss", "seq_aux_loss"),
    ),
    true_anyway("no token is dropped", "moe-token-drop-policy", words="one", accepted=("probs", "position")),
    without_effect("tokens travel to experts by all-to-all; the result is the same", "moe-token-dispatcher-type"),
    without_effect("tokens travel to experts by all-to-all; the result is the same", "moe-enable-deepep", words="none"),
    without_effect("tokens are permuted without fusion; the result is the same", "moe-permute-fusion", words="none"),
    not_here("a fused router ignores the engine's choice of experts, which training replays", "moe-router-fusion"),
    not_here("use --use-rollout-routing-replay, which replays the engine's choice", "use-routing-replay"),
    differs("on by default for mixtures of experts", "use-rollout-routing-replay"),
    differs(
        "default: 1 with --expert-model-parallel-size above 1, Megatron's is --tensor-model-parallel-size",
        "expert-tensor-parallel-size",
    ),
)

_COMMUNICATION: Sequence[Rows] = (
    true_anyway("the trainer is Megatron-core", "use-mcore-models"),
    without_effect(
        "only the reduction of gradients is overlapped (--overlap-grad-reduce); the result is the same",
        "overlap-param-gather",
        "overlap-param-gather-with-optimizer-step",
        "no-align-param-gather",
        "tp-comm-overlap",
        "no-overlap-p2p-communication",
        "moe-shared-expert-overlap",
        "overlap-moe-expert-parallel-comm",
        "delay-wgrad-compute",
        words="none",
    ),
    without_effect("Megatron's default size of buckets is used", "ddp-bucket-size", "ddp-num-buckets"),
    without_effect(
        "gradients are summed, because the loss is divided before", "ddp-average-in-collective", words="none"
    ),
    without_effect(
        "pipeline stages are not interleaved; the result is the same",
        "num-layers-per-virtual-pipeline-stage",
        "num-virtual-stages-per-pipeline-rank",
    ),
    without_effect(
        "the trainer uses no CUDA graphs; the result is the same",
        "enable-cuda-graph",
        "external-cuda-graph",
        "te-rng-tracker",
        words="none",
    ),
    without_effect("the trainer uses no CUDA graphs; the result is the same", "cuda-graph-impl"),
    not_here("use --use-distributed-optimizer", "use-torch-fsdp2", "use-megatron-fsdp"),
)

_MEMORY: Sequence[Rows] = (
    without_effect(
        "log-probs are computed in chunks, without Megatron's cross entropy", "cross-entropy-loss-fusion", words="none"
    ),
    without_effect("log-probs are computed in chunks, without Megatron's cross entropy", "cross-entropy-fusion-impl"),
    without_effect("garbage collections leave out the objects of the start", "manual-gc", words="none"),
    without_effect("garbage collections leave out the objects of the start", "manual-gc-interval"),
    without_effect("log-probs are computed in chunks of 512 MiB of logits", "log-probs-chunk-size"),
    without_effect("log-probs use the microbatches of --max-tokens-per-gpu", "log-probs-max-tokens-per-gpu"),
    without_effect(
        "log-probs are computed in chunks, whose logits are not kept", "recompute-loss-function", words="none"
    ),
    without_effect("packed sequences are padded as the parallel layout requires", "data-pad-size-multiplier"),
    true_anyway("sequences are packed", "qkv-format", words="one", accepted=("thd",)),
    true_anyway("sequences are packed", "variable-seq-lengths"),
    without_effect("sequences are packed up to --max-tokens-per-gpu", "seq-length"),
    without_effect("no setting needs it", "enable-experimental", words="none"),
    without_effect(
        "a loss or gradient norm that is not finite ends the run", "no-check-for-nan-in-loss-and-grad", words="none"
    ),
    not_here("use --balance-data", "balance-by-flops"),
    not_here("use --colocate, which moves the trainer to host memory during generation", "release-train"),
)

_OBJECTIVE: Sequence[Rows] = (
    true_anyway(
        "the loss is the policy's, or that of --custom-loss-function-path",
        "loss-type",
        words="one",
        accepted=("policy_loss", "custom_loss"),
    ),
    without_effect(
        "the ratio uses the engine's log-probs, or the trainer's from the start of the step",
        "keep-old-actor",
        words="none",
    ),
    without_effect(
        "mismatch/... is always reported, train/logprob_diff while engines serve the trainer's weights",
        "get-mismatch-metrics",
        words="none",
    ),
    differs("on by default, unless --max-staleness is 0 or --use-tis is given", "use-rollout-logprobs"),
    not_here(
        "no function replaces the mean over tokens or rollouts; for the constant divisor of Dr. GRPO, give "
        "--custom-loss-function-path the loss constant_divisor of docs/plugins.md",
        "custom-pg-loss-reducer-function-path",
    ),
    not_here("use --custom-reward-post-process-path", "disable-rewards-normalization"),
    not_here(
        "every run computes advantages; use --custom-advantage-function-path for others",
        "disable-compute-advantages-and-returns",
    ),
    not_here("the reference model stays as --ref-load has it", "ref-update-interval"),
    not_here("use --custom-loss-function-path, which sees log-probs", "use-rollout-entropy"),
    not_here(
        "there is no distillation; use --custom-loss-function-path for another loss",
        "use-opd",
        "opd-type",
        "opd-kl-coef",
        "opd-teacher-load",
        "opd-teacher-ckpt-step",
    ),
    not_here(
        "the trainer calls no function of Megatron's; use --custom-loss-function-path",
        "custom-megatron-init-path",
        "custom-megatron-before-log-prob-hook-path",
        "custom-megatron-before-train-step-hook-path",
    ),
)

_CHECKPOINTS: Sequence[Rows] = (
    differs("on by default", "async-save"),
    true_anyway("training uses no random state", "no-load-rng", "no-save-rng"),
    without_effect("loading, saving and updates share one mapping", "megatron-to-hf-mode"),
    true_anyway("the trainer is Megatron", "train-backend", words="one", accepted=("megatron",)),
    true_anyway(
        "checkpoints have Megatron's format torch_dist",
        "ckpt-format",
        "dist-ckpt-format",
        words="one",
        accepted=("torch_dist",),
    ),
    true_anyway("checkpoints have Megatron's format torch_dist", "use-dist-ckpt"),
    true_anyway("the format of a folder is detected", "auto-detect-ckpt-format"),
    without_effect(
        "the ranks' shares of the writing are fixed; the checkpoint is the same",
        "ckpt-fully-parallel-save",
        "no-ckpt-fully-parallel-save",
        "ckpt-fully-parallel-load",
        words="none",
    ),
    without_effect(
        "config.json and the flags of the run count, not a checkpoint's", "use-checkpoint-args", words="none"
    ),
    without_effect("every weight is read from a file", "no-initialization", words="none"),
    without_effect("every weight is read from a file", "init-method-std"),
    not_here("use --keep-checkpoints", "save-retain-interval"),
    not_here("use --ref-load, which loads only the weights of a checkpoint", "finetune"),
    not_here("give the folder of that checkpoint, iter_XXXXXXX, with --ref-load", "ref-ckpt-step"),
    not_here("use --load and --ckpt-step", "start-rollout-id"),
    not_here(
        "the final model is in the run directory; asyncrl.engines.megatron.weights.convert exports other checkpoints",
        "save-hf",
    ),
)

TRAINING: Rows = tuple(
    row
    for part in (_OPTIMIZER, _NUMBERS, _EXPERTS, _COMMUNICATION, _MEMORY, _OBJECTIVE, _CHECKPOINTS)
    for rows in part
    for row in rows
)
