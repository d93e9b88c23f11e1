"""Convert weights between a Hugging Face folder and Megatron's torch_dist format, without a run.

    python -m asyncrl.engines.megatron.weights.convert to-torch-dist HF_FOLDER DIR
    python -m asyncrl.engines.megatron.weights.convert to-hf DIR HF_FOLDER --hf-checkpoint ORIGINAL

``DIR`` gets a folder ``release`` and the file that names it, as Megatron's own converters write them.  ``--load DIR``
and ``--ref-load DIR`` then start from it, in any layout.  Weights are converted one at a time: memory is needed for the
largest one, a few times over, and not for the model.  Several processes share the work:

    torchrun --nproc-per-node 8 -m asyncrl.engines.megatron.weights.convert to-torch-dist HF_FOLDER DIR

No GPU is used.
"""

import argparse
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from asyncrl.engines.megatron.checkpoint.dist_files import INTERNALS as DIST_FILES
from asyncrl.engines.megatron.checkpoint.state import INTERNALS as STATE
from asyncrl.engines.megatron.model.attention import INTERNALS as ATTENTION
from asyncrl.engines.megatron.model.build import INTERNALS as MODEL
from asyncrl.engines.megatron.model.layers import INTERNALS as LAYERS
from asyncrl.engines.megatron.setup.cpu_emulation import emulate_cuda
from asyncrl.engines.megatron.weights.conversion import to_hf, to_torch_dist
from asyncrl.engines.megatron.weights.hf_weights import INTERNALS as WEIGHTS
from asyncrl.engines.megatron.weights.meta_model import INTERNALS as META_MODEL
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.internals import check_internals

LAYOUT_FLAGS = ("tensor", "pipeline", "expert")
"""Flags that are accepted without effect.  Other converters need a layout for a large model, so scripts pass one."""


def main(argv: Sequence[str]) -> int:
    """Convert as ``argv`` asks, and return the exit code."""
    asked = _parser().parse_args(argv)
    try:
        check_internals(ATTENTION, DIST_FILES, LAYERS, META_MODEL, MODEL, STATE, WEIGHTS)
        with _processes():
            asked.convert(asked)
    except AsyncRLError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


@contextmanager
def _processes() -> Iterator[None]:
    """Connect all processes that torchrun started, or this one alone, in a layout that does not split the model."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{_free_port()}", rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        emulate_cuda()
        model_parallel_cuda_manual_seed(0)
        yield
        parallel_state.destroy_model_parallel()
    finally:
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    into = kinds.add_parser("to-torch-dist", help="convert a Hugging Face folder, for --load and --ref-load")
    into.set_defaults(convert=lambda asked: to_torch_dist(asked.source, asked.target, asked.vocab_size))
    into.add_argument("--vocab-size", type=int, metavar="ROWS", help="pad embeddings to this size with zeros")
    back = kinds.add_parser("to-hf", help="convert the newest checkpoint in a folder to Hugging Face format")
    back.set_defaults(convert=lambda asked: to_hf(asked.source, asked.target, asked.hf_checkpoint, asked.vocab_size))
    back.add_argument("--hf-checkpoint", type=Path, required=True, help="folder that training started from")
    back.add_argument(
        "--vocab-size", type=int, metavar="ROWS", help="rows of padded embeddings to keep; default: config.json's"
    )
    for kind in (into, back):
        kind.add_argument("source", type=Path)
        kind.add_argument("target", type=Path)
        for name in LAYOUT_FLAGS:
            kind.add_argument(f"--{name}-model-parallel-size", type=int, help="accepted, without effect")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
