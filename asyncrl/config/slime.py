"""Flags in slime's scripts that are not here, and what there is instead.  docs/slime.md shows them."""

from collections.abc import Mapping

_CONFIG = "not needed: the model's config.json says it"
_NO_MTP = "not there: layers that predict further tokens are left out, also of what is saved"
_NO_GENERATE = "not there yet: every prompt gets answers of one turn"
_NO_GROUP = "not there: a reward judges one answer; --custom-advantage-function-path sees groups"
_NO_DEBUG = "not there: --dry-run checks a run, benchmarks/trainer.py trains alone"
_NO_OPD = "not there: distillation; --custom-loss-function-path takes a loss of yours"
_COLOCATE = "--colocate does it; without that nobody wants the memory"
_EVAL_KEYS = "not there: all data sets have the keys of --input-key and --label-key"
_TENSORBOARD = "not there: --use-tensorboard, and metrics.jsonl in the run directory"
_WHOLE = "not there: updates send all weights"

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
    # how it trains
    **dict.fromkeys(("attention-dropout", "hidden-dropout"), "not needed: there is no dropout"),
    **dict.fromkeys(
        ("attention-softmax-in-fp32", "attention-backend"), "not needed: torch's kernel for packed answers"
    ),
    "accumulate-allreduce-grads-in-fp32": "not needed: gradients are added up in float32",
    "lr-decay-style": "not needed: the rate is constant after --lr-warmup-iters",
    "optimizer": "not needed: it is AdamW (--weight-decay, --adam-beta1, ...)",
    "train-backend": "not needed: it is Megatron",
    "log-probs-chunk-size": "not needed: log-probs are always computed in chunks",
    **dict.fromkeys(("qkv-format", "variable-seq-lengths"), "not needed: answers are always packed"),
    "moe-grouped-gemm": "not needed: a layer's experts are one product",
    "moe-token-dispatcher-type": "not needed: it is alltoall",
    "moe-router-dtype": "not needed: it is float32",
    **dict.fromkeys(
        ("moe-router-load-balancing-type", "moe-aux-loss-coeff", "moe-token-drop-policy"),
        "not needed: there is no balancing loss, and no token is dropped",
    ),
    "moe-permute-fusion": "not there: --transformer-impl has other fusions",
    **dict.fromkeys(
        ("no-rope-fusion", "no-bias-swiglu-fusion", "no-gradient-accumulation-fusion", "no-masked-softmax-fusion"),
        "not needed: it is off",
    ),
    **dict.fromkeys(("mtp-num-layers", "enable-mtp-training", "mtp-loss-scaling-factor"), _NO_MTP),
    **dict.fromkeys(("apply-layernorm-1p", "attention-output-gate", "spec"), "not there: a model that needs it"),
    "finetune": "--ref-load takes a checkpoint's weights alone",
    "no-load-rng": "not needed: nothing draws from the trainer's random state",
    "megatron-to-hf-mode": "not needed: there is one mapping for loading, saving and updates",
    "bf16": "--dtype bfloat16, which auto is on GPUs",
    "seq-length": "not needed: answers are packed to --max-tokens-per-gpu",
    "loss-type": "--custom-loss-function-path takes a loss of yours",
    "custom-tis-function-path": "--tis-mode and --tis-level, or --custom-loss-function-path",
    "get-mismatch-metrics": "not needed: train/logprob_diff, wherever engines serve the trainer's weights",
    "keep-old-actor": "not needed: the ratio's log-probs are the engine's, or the trainer's from before the step",
    **dict.fromkeys(("use-opd", "opd-type", "opd-kl-coef", "opd-teacher-load", "opd-teacher-ckpt-step"), _NO_OPD),
    # where
    **dict.fromkeys(("offload", "offload-train", "offload-rollout"), _COLOCATE),
    "num-gpus-per-node": "not needed: Ray knows",
    "use-fault-tolerance": "not needed: engines are started again unless --max-engine-restarts is 0",
    "rollout-external-engine-addrs": "not there: engines are started by the run",
    "custom-config-path": "--config FILE.toml",
    # weight updates
    **dict.fromkeys(("update-weight-mode", "update-weight-delta-encoding", "update-weight-delta-checksum"), _WHOLE),
    "check-weight-update-equal": "--check-weight-updates",
    # generation
    **dict.fromkeys(("custom-generate-function-path", "tool-key", "log-multi-turn", "loss-mask-type"), _NO_GENERATE),
    "rollout-function-path": "not there: the loop is the product; filters, rewards and advantages are by path",
    "eval-function-path": "not there: evaluation is generation with --eval-temperature and the same reward",
    "rollout-max-context-len": "--rollout-max-prompt-len and --rollout-max-response-len",
    "rollout-buffer-url": "not there",
    **dict.fromkeys(
        ("rollout-health-check-interval", "rollout-health-check-timeout", "rollout-health-check-first-wait"),
        "not needed: engines are always watched; --max-engine-restarts bounds what is done",
    ),
    # data
    "num-epoch": "--num-rollout counts training steps",
    "data-source-path": "not there: --prompt-data names a JSONL file",
    "multimodal-keys": "not there: prompts are text",
    "start-rollout-id": "--load and --ckpt-step",
    "balance-by-flops": "--balance-data",
    # rewards
    **dict.fromkeys(("group-rm", "custom-reward-post-process-path"), _NO_GROUP),
    **dict.fromkeys(("reward-key", "eval-reward-key"), "not there: a reward is one number"),
    "rm-url": "--custom-rm-path asks whom you like",
    # evaluation
    **dict.fromkeys(("eval-input-key", "eval-label-key", "eval-tool-key"), _EVAL_KEYS),
    "eval-config": "--eval-prompt-data NAME PATH ...",
    **dict.fromkeys(
        ("eval-top-p", "eval-top-k"), "not there: evaluation samples with --rollout-top-p and --rollout-top-k"
    ),
    # checkpoints
    "ref-ckpt-step": "not needed: --ref-load takes the folder of one checkpoint as well",
    "save-hf": "not needed: the final model is in the run directory; asyncrl.engines.megatron.convert makes others",
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
"""By the flag's name: what it says here."""
