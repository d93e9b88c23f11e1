"""How far apart log-probs are that differ in rounding alone: what engine and trainer can agree to, in bfloat16.

    uv run benchmarks/rounding.py --model 1.7b
    uv run benchmarks/rounding.py --model 0.6b --layers 14

Random weights, as the other benchmarks have them, in transformers on a CPU: float32, and bfloat16 with two kernels of
attention that compute the same.  Prints mean absolute differences, in nats.
"""

import argparse
import itertools
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from benchmarks._circumstances import circumstances
from benchmarks._shapes import SHAPES, write_random

VOCAB = 8192
"""In place of Qwen3's 151,936 words: the output layer is one product of thirty, and would be most of the memory."""
DENSE = tuple(name for name, shape in SHAPES.items() if "num_experts" not in shape)


def main(argv: Sequence[str]) -> int:
    """One model; the exit code."""
    asked = _parser().parse_args(argv)
    changes = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
    if asked.layers is not None:
        changes["num_hidden_layers"] = asked.layers
    tokens_T = torch.randint(VOCAB, (asked.tokens,), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        model = write_random(Path(folder) / "model", asked.model, device="cpu", **changes)
        found = {
            "float32": _logprobs(model, tokens_T, torch.float32, "sdpa"),
            "bfloat16": _logprobs(model, tokens_T, torch.bfloat16, "sdpa"),
            "bfloat16, other attention": _logprobs(model, tokens_T, torch.bfloat16, "eager"),
        }
    console = Console()
    for (one, mine_T), (other, theirs_T) in itertools.combinations(found.items(), 2):
        console.print(f"{one} and {other}: {(mine_T - theirs_T).abs().mean():.4f}", highlight=False)
    for name, value in circumstances("rounding.py", argv).items():
        console.print(f"{name}: {value}", highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DENSE, default="0.6b")
    parser.add_argument("--layers", type=int, help="default: as many as the model has")
    parser.add_argument("--tokens", type=int, default=256)
    return parser


def _logprobs(checkpoint: Path, tokens_T: Tensor, dtype: torch.dtype, attention: str) -> Tensor:
    """Of each token but the first, given those before it, in float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        logits_TV = model(tokens_T[None]).logits[0, :-1].float()
    return logits_TV.log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
