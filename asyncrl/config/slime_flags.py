"""The flags of slime's scripts that asyncrl lacks, each with its replacement or a reason.  docs/slime.md lists them."""

from collections.abc import Mapping

_CONFIG = "not needed: read from the model's config.json"
_NO_MTP = "not supported: multi-token prediction layers are dropped, and are not saved"
_NO_GENERATE = "not supported yet: every response is a single turn"
_NO_GROUP = "not supported: a reward sees one response; use --custom-advantage-function-path, which sees groups"
_NO_DEBUG = "not supported: use --dry-run to check a run, or python -m benchmarks.trainer to run the trainer alone"
_NO_OPD = "not supported: asyncrl has no distillation; use --custom-loss-function-path for another loss"
_COLOCATE = "use --colocate; without it trainer and engines have separate GPUs"
_EVAL_KEYS = "not supported: --input-key and --label-key apply to all data sets"
_TENSORBOARD = "not supported: use --use-tensorboard, or metrics.jsonl in the run directory"
_WHOLE = "not supported: every update sends all weights"

INSTEAD: Mapping[str, str] = {
    # the model
    **dict.fromkeys(
        (
            "swiglu",
            "group-query-attention",
            "use-rotary-position-embeddings",
            "position-embedding-type",
            "disable-bias-linear",
            "add-qkv-bias",
            "normalization",
            "vocab-size",
            "make-vocab-size-divisible-by",
            "qk-layernorm",
            "untie-embeddings-and-output-weights",
            "num-experts",
            "moe-ffn-hidden-size",
            "moe-shared-expert-intermediate-size",
            "moe-layer-freq",
            "moe-router-topk",
            "moe-router-score-function",
            "moe-router-pre-softmax",
            "moe-router-enable-expert-bias",
            "moe-router-num-groups",
            "moe-router-group-topk",
            "moe-router-topk-scaling-factor",
            "multi-latent-attention",
            "q-lora-rank",
            "kv-lora-rank",
            "qk-head-dim",
            "qk-pos-emb-head-dim",
            "v-head-dim",
            "rotary-scaling-factor",
            "model-name",
        ),
        _CONFIG,
    ),
    # training
    **dict.fromkeys(("attention-dropout", "hidden-dropout"), "not needed: there is no dropout"),
    **dict.fromkeys(
        ("attention-softmax-in-fp32", "attention-backend"),
        "not needed: attention runs in torch's kernel for packed sequences",
    ),
    "accumulate-allreduce-grads-in-fp32": "not needed: gradients always accumulate in float32",
    "lr-decay-style": "not needed: the learning rate is constant after --lr-warmup-iters",
    "optimizer": "not needed: the optimizer is AdamW (--weight-decay, --adam-beta1, ...)",
    "train-backend": "not needed: the trainer is Megatron",
    "log-probs-chunk-size": "not needed: log-probs are always computed in chunks",
    **dict.fromkeys(("qkv-format", "variable-seq-lengths"), "not needed: sequences are always packed"),
    "moe-grouped-gemm": "not needed: experts always run as a grouped GEMM",
    "moe-token-dispatcher-type": "not needed: always alltoall",
    "moe-router-dtype": "not needed: always float32",
    **dict.fromkeys(
        ("moe-router-load-balancing-type", "moe-aux-loss-coeff", "moe-token-drop-policy"),
        "not needed: there is no load-balancing loss, and no token is dropped",
    ),
    "moe-permute-fusion": "not supported: use --transformer-impl for other fusions",
    **dict.fromkeys(
        ("no-rope-fusion", "no-bias-swiglu-fusion", "no-gradient-accumulation-fusion", "no-masked-softmax-fusion"),
        "not needed: the fusion is off",
    ),
    **dict.fromkeys(("mtp-num-layers", "enable-mtp-training", "mtp-loss-scaling-factor"), _NO_MTP),
    **dict.fromkeys(
        ("apply-layernorm-1p", "attention-output-gate", "spec"), "not supported: no supported model needs it"
    ),
    "finetune": "use --ref-load, which loads only the weights of a checkpoint",
    "no-load-rng": "not needed: training does not use the random state",
    "megatron-to-hf-mode": "not needed: loading, saving and updates share one mapping",
    "bf16": "use --dtype bfloat16, the default on GPUs",
    "seq-length": "not needed: sequences are packed up to --max-tokens-per-gpu",
    "loss-type": "use --custom-loss-function-path",
    "custom-tis-function-path": "use --tis-mode and --tis-level, or --custom-loss-function-path",
    "get-mismatch-metrics": "not needed: train/logprob_diff is reported while engines serve the trainer's weights",
    "keep-old-actor": "not needed: the ratio uses the engine's log-probs, or the trainer's from the start of the step",
    **dict.fromkeys(("use-opd", "opd-type", "opd-kl-coef", "opd-teacher-load", "opd-teacher-ckpt-step"), _NO_OPD),
    # placement and processes
    **dict.fromkeys(("offload", "offload-train", "offload-rollout"), _COLOCATE),
    "num-gpus-per-node": "not needed: Ray reports it",
    "use-fault-tolerance": "not needed: engines restart unless --max-engine-restarts is 0",
    "rollout-external-engine-addrs": "not supported: the run starts its engines",
    "custom-config-path": "use --config FILE.toml",
    # weight updates
    **dict.fromkeys(("update-weight-mode", "update-weight-delta-encoding", "update-weight-delta-checksum"), _WHOLE),
    "check-weight-update-equal": "use --check-weight-updates",
    # generation
    **dict.fromkeys(("custom-generate-function-path", "tool-key", "log-multi-turn", "loss-mask-type"), _NO_GENERATE),
    "rollout-function-path": "not supported: the rollout loop is fixed; rewards, filters and losses are replaceable",
    "eval-function-path": "not supported: evaluation generates with --eval-temperature and uses the same reward",
    "rollout-max-context-len": "use --rollout-max-prompt-len and --rollout-max-response-len",
    "rollout-buffer-url": "not supported: the buffer is in the driver process",
    **dict.fromkeys(
        ("rollout-health-check-interval", "rollout-health-check-timeout", "rollout-health-check-first-wait"),
        "not needed: engines are always watched; --max-engine-restarts limits restarts",
    ),
    # data
    "num-epoch": "use --num-rollout, which counts training steps",
    "multimodal-keys": "not supported: prompts are text",
    "start-rollout-id": "use --load and --ckpt-step",
    "balance-by-flops": "use --balance-data",
    # rewards
    "group-rm": _NO_GROUP,
    **dict.fromkeys(("reward-key", "eval-reward-key"), "not supported: a reward is one number"),
    "rm-url": "use --custom-rm-path with a function that calls the service",
    # evaluation
    **dict.fromkeys(("eval-input-key", "eval-label-key", "eval-tool-key"), _EVAL_KEYS),
    "eval-config": "use --eval-prompt-data NAME PATH ...",
    **dict.fromkeys(
        ("eval-top-p", "eval-top-k"), "not supported: evaluation samples with --rollout-top-p and --rollout-top-k"
    ),
    # checkpoints
    "ref-ckpt-step": "not needed: --ref-load also accepts the folder of one checkpoint",
    "save-hf": "not needed: the final model is in the run directory; "
    "asyncrl.engines.megatron.weights.convert exports other checkpoints",
    # reports
    **dict.fromkeys(
        (
            "use-wandb",
            "wandb-mode",
            "wandb-dir",
            "wandb-key",
            "wandb-host",
            "wandb-team",
            "wandb-group",
            "wandb-project",
        ),
        _TENSORBOARD,
    ),
    **dict.fromkeys(
        (
            "debug-rollout-only",
            "debug-train-only",
            "save-debug-rollout-data",
            "load-debug-rollout-data",
            "dump-details",
        ),
        _NO_DEBUG,
    ),
}
"""The replacement or reason by the flag's name, as the error line and docs/slime.md show it."""
