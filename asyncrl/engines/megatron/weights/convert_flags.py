"""The command line of ``convert``: our form with two paths, and the flags of slime's converters.

convert to-torch-dist HF_FOLDER DIR                               convert to-torch-dist --hf-checkpoint --save
convert to-hf DIR TARGET --hf-checkpoint HF_FOLDER                convert to-hf --input-dir --output-dir ...
convert fsdp-to-hf DIR TARGET --hf-checkpoint HF_FOLDER           convert fsdp-to-hf --input-dir --output-dir ...
"""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from asyncrl.config import ShapeConfig
from asyncrl.config.areas.ranges import flag

LAYOUT_FLAGS = (
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "expert-model-parallel-size"),
    *("expert-tensor-parallel-size", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
)
"""Flags that are accepted without effect.  Other converters need a layout for a large model, so scripts pass one."""
TARGET_FLAGS = ("--save", "--output-dir")
"""Flags with which slime's converters name the target.  If one is given, no path may be given without a flag."""
BARE_MODEL_FLAGS = (
    *("add-qkv-bias", "apply-layernorm-1p", "attention-output-gate", "attention-softmax-in-fp32"),
    *("disable-bias-linear", "group-query-attention", "moe-grouped-gemm", "moe-permute-fusion"),
    *("moe-router-enable-expert-bias", "moe-router-pre-softmax", "moe-shared-expert-gate", "multi-latent-attention"),
    *("no-gradient-accumulation-fusion", "no-masked-softmax-fusion", "no-position-embedding", "no-rope-fusion"),
    "post-mlp-layernorm",
    *("post-self-attn-layernorm", "qk-layernorm", "rotary-interleaved", "swiglu"),
    *("untie-embeddings-and-output-weights", "use-rope-scaling", "use-rotary-position-embeddings"),
)
"""Flags in ``MODEL_ARGS`` of slime's scripts that have no value.  The family of ``config.json`` decides instead."""
VALUED_MODEL_FLAGS = (
    *("kv-lora-rank", "make-vocab-size-divisible-by", "moe-aux-loss-coeff", "moe-ffn-hidden-size", "moe-layer-freq"),
    *("moe-router-bias-update-rate", "moe-router-dtype", "moe-router-group-topk", "moe-router-load-balancing-type"),
    *("moe-router-num-groups", "moe-router-score-function", "moe-router-topk", "moe-router-topk-scaling-factor"),
    *("moe-shared-expert-intermediate-size", "moe-token-dispatcher-type", "moe-token-drop-policy", "mscale"),
    *("mscale-all-dim", "mtp-num-layers", "normalization", "num-experts", "position-embedding-type", "q-lora-rank"),
    *("qk-head-dim", "qk-pos-emb-head-dim", "rotary-scaling-factor", "seq-length", "v-head-dim"),
)
"""Flags in ``MODEL_ARGS`` that have one value, without the shape flags, which are checked."""


def parser(description: str | None, argv: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser for ``argv``: paths have flags if ``argv`` names the target with one."""
    is_named = any(word.partition("=")[0] in TARGET_FLAGS for word in argv)
    root = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = root.add_subparsers(required=True, dest="kind")
    into = kinds.add_parser("to-torch-dist", help="convert a Hugging Face folder, for --load and --ref-load")
    into.add_argument("--vocab-size", type=int, metavar="ROWS", help="pad embeddings to this size with zeros")
    _add_paths(into, "--hf-checkpoint", "--save", is_named=is_named)
    _add_model_flags(into)
    back = kinds.add_parser("to-hf", help="convert the newest checkpoint in a folder to Hugging Face format")
    back.add_argument(
        "--vocab-size", type=int, metavar="ROWS", help="rows of padded embeddings to keep; default: config.json's"
    )
    _add_original(back, is_named=is_named)
    back.add_argument("-f", "--force", action="store_true", help="accepted: a model in TARGET is always replaced")
    back.add_argument("--chunk-size", type=int, help="accepted, without effect: files have about 4 GiB")
    back.add_argument("--model-name", help="accepted, without effect: config.json names the architecture")
    fsdp = kinds.add_parser("fsdp-to-hf", help="convert an FSDP checkpoint (torch DCP) to Hugging Face format")
    _add_original(fsdp, is_named=is_named)
    fsdp.add_argument("-f", "--force", action="store_true", help="replace TARGET if it is not empty")
    fsdp.add_argument(
        *("-a", "--add-missing-from-origin-hf"),
        action="store_true",
        help="copy tensors that the checkpoint lacks from the original folder",
    )
    for kind in (into, back):
        for name in LAYOUT_FLAGS:
            kind.add_argument(f"--{name}", type=int, help="accepted, without effect")
    return root


def shape_of_flags(asked: argparse.Namespace) -> ShapeConfig:
    """Return the shape flags of ``to-torch-dist``.  Raises ConfigError for a value out of range."""
    return ShapeConfig(**{field.name: getattr(asked, field.name) for field in fields(ShapeConfig)})


def _add_original(kind: argparse.ArgumentParser, *, is_named: bool) -> None:
    kind.add_argument(
        *("--hf-checkpoint", "--origin-hf-dir"), type=Path, required=True, help="folder that training started from"
    )
    _add_paths(kind, "--input-dir", "--output-dir", is_named=is_named)


def _add_paths(kind: argparse.ArgumentParser, source: str, target: str, *, is_named: bool) -> None:
    if is_named:
        kind.add_argument(source, dest="source", type=Path, required=True, metavar="DIR", help="folder to convert")
        kind.add_argument(target, dest="target", type=Path, required=True, metavar="DIR", help="folder to write")
        return
    kind.add_argument("source", type=Path, help=f"folder to convert; in slime's form {source}")
    kind.add_argument("target", type=Path, help=f"folder to write; in slime's form {target}")


def _add_model_flags(kind: argparse.ArgumentParser) -> None:
    """Add the flags of ``MODEL_ARGS`` in slime's scripts: shape flags, and flags without effect."""
    for field in fields(ShapeConfig):
        number = float if field.name in ("rotary_base", "rotary_percent", "norm_epsilon") else int
        kind.add_argument(f"--{flag(field.name)}", type=number, help="as in a run")
    for name in BARE_MODEL_FLAGS:
        kind.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    for name in VALUED_MODEL_FLAGS:
        kind.add_argument(f"--{name}", help=argparse.SUPPRESS)
    kind.add_argument("--spec", nargs=2, help=argparse.SUPPRESS)  # module and function, for GLM-4
