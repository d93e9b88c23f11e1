"""The difference of log-probs through rounding alone: how closely engine and trainer can agree in bfloat16 or fp8.

    uv run python -m benchmarks.rounding --model 1.7b               bfloat16
    uv run python -m benchmarks.rounding --model 0.6b --layers 14   bfloat16, half of the layers
    uv run python -m benchmarks.rounding --model 1.7b --fp8         fp8

The model has random weights, as in the other benchmarks, and runs in transformers on a CPU.  Without --fp8 it runs in
float32, and in bfloat16 with two attention kernels that compute the same.  With --fp8 it runs in float32 three times:
with exact weights; with the weights of the layers' matrices rounded to E4M3 in blocks of 128 x 128, as a trainer reads
them; and with the inputs of these matrices rounded too, in blocks of 128 numbers of a token, as an engine computes.
Prints mean absolute differences, in nats.
"""

import argparse
import itertools
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from asyncrl.engines.megatron.checkpoint.hf_files import scaled
from asyncrl.engines.megatron.weights.fp8 import quantised
from benchmarks.common.circumstances import circumstances
from benchmarks.common.command_line import add_option, parser_of
from benchmarks.common.shapes import SHAPES, write_random

VOCAB = 8192
"""Vocabulary size in place of Qwen3's 151,936: the output layer, one product of thirty, would take most memory."""
DENSE = tuple(name for name, shape in SHAPES.items() if "num_experts" not in shape)


def main(argv: Sequence[str]) -> int:
    """Measure one model and return the exit code."""
    asked = _parser().parse_args(argv)
    changes = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
    if asked.layers is not None:
        changes["num_hidden_layers"] = asked.layers
    tokens_T = torch.randint(VOCAB, (asked.tokens,), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        model = write_random(Path(folder) / "model", asked.model, device="cpu", **changes)
        found = (_in_fp8 if asked.fp8 else _in_bfloat16)(model, tokens_T)
    console = Console()
    for (one, mine_T), (other, theirs_T) in itertools.combinations(found.items(), 2):
        console.print(f"{one} and {other}: {(mine_T - theirs_T).abs().mean():.4f}", highlight=False)
    for name, value in circumstances("rounding", argv).items():
        console.print(f"{name}: {value}", highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("rounding", __doc__)
    add_option(parser, "--model", str, "shape of the model, which gets random weights", "0.6b", choices=DENSE)
    add_option(parser, "--layers", int, "number of layers (default: the model's)")
    add_option(parser, "--tokens", int, "number of tokens", 256)
    parser.add_argument("--fp8", action="store_true", help="weights and inputs of the layers' matrices in E4M3")
    return parser


def _in_bfloat16(checkpoint: Path, tokens_T: Tensor) -> dict[str, Tensor]:
    return {
        "float32": _logprobs(_model(checkpoint, torch.float32), tokens_T),
        "bfloat16": _logprobs(_model(checkpoint, torch.bfloat16), tokens_T),
        "bfloat16, other attention": _logprobs(_model(checkpoint, torch.bfloat16, "eager"), tokens_T),
    }


def _in_fp8(checkpoint: Path, tokens_T: Tensor) -> dict[str, Tensor]:
    model = _model(checkpoint, torch.float32)
    matrices = [each for each in model.model.modules() if isinstance(each, nn.Linear)]
    found = {"float32": _logprobs(model, tokens_T)}
    for matrix in matrices:
        matrix.weight.data = _rounded(matrix.weight.data, (128, 128))
    found["weights in fp8"] = _logprobs(model, tokens_T)
    for matrix in matrices:
        matrix.register_forward_pre_hook(lambda _, given: _rounded(given[0][0], (1, 128))[None])
    return found | {"weights and activations in fp8": _logprobs(model, tokens_T)}


def _rounded(numbers: Tensor, block: tuple[int, int]) -> Tensor:
    """``numbers`` rounded to fp8, each block with a separate scale."""
    rounded, scales = quantised(numbers, block, torch.float32)
    return scaled(rounded.float(), scales.float(), block)


def _model(checkpoint: Path, dtype: torch.dtype, attention: str = "sdpa") -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation=attention)


def _logprobs(model: Any, tokens_T: Tensor) -> Tensor:
    """Log-probs of each token but the first, given those before it, in float32."""
    with torch.no_grad():
        logits_TV: Tensor = model(tokens_T[None]).logits[0, :-1].float()
    return logits_TV.log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
