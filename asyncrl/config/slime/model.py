"""The flags of Megatron that describe a model, as in slime's ``scripts/models``."""

from collections.abc import Sequence

from asyncrl.config.slime.status import Rows, not_here, of_model, without_effect

_READ = "read from the model's config.json, and compared with it"
_FAMILY = "no supported model needs it (docs/models.md lists the models)"

_SHAPES: Sequence[Rows] = (
    of_model(
        _READ,
        "swiglu",
        "group-query-attention",
        "use-rotary-position-embeddings",
        "no-position-embedding",
        "disable-bias-linear",
        "add-qkv-bias",
        "qk-layernorm",
        "untie-embeddings-and-output-weights",
        "multi-latent-attention",
        "post-self-attn-layernorm",
        "post-mlp-layernorm",
        "rotary-interleaved",
        "use-rope-scaling",
        "moe-router-pre-softmax",
        "moe-router-enable-expert-bias",
        words="none",
    ),
    of_model(
        _READ,
        "position-embedding-type",
        "normalization",
        "vocab-size",
        "num-experts",
        "moe-ffn-hidden-size",
        "moe-shared-expert-intermediate-size",
        "moe-layer-freq",
        "moe-router-topk",
        "moe-router-score-function",
        "moe-router-num-groups",
        "moe-router-group-topk",
        "moe-router-topk-scaling-factor",
        "q-lora-rank",
        "kv-lora-rank",
        "qk-head-dim",
        "qk-pos-emb-head-dim",
        "v-head-dim",
        "rotary-scaling-factor",
        "mscale",
        "mscale-all-dim",
    ),
    of_model("config.json names the architecture, which decides the layers", "spec", words="many"),
)

_OTHERS: Sequence[Rows] = (
    without_effect("config.json names the architecture, which decides how weights are converted", "model-name"),
    without_effect(
        "the vocabulary is never padded: it is config.json's", "make-vocab-size-divisible-by", "padded-vocab-size"
    ),
    not_here(
        _FAMILY,
        "apply-layernorm-1p",
        "attention-output-gate",
        "use-gated-attention",
        "moe-shared-expert-gate",
        "qwen-gdn-backend",
        "freeze-indexer",
        "allgather-cp",
    ),
    not_here(
        "the layers come from config.json's architectures; docs/models.md says how to add a family",
        "custom-model-provider-path",
    ),
    not_here(
        "multi-token prediction layers are dropped, and are not saved",
        "mtp-num-layers",
        "enable-mtp-training",
        "mtp-loss-scaling-factor",
    ),
)

MODEL: Rows = tuple(row for rows in (*_SHAPES, *_OTHERS) for row in rows)
