"""Convert weights between a Hugging Face folder and the formats of trainers, without a run.

    python -m asyncrl.engines.megatron.weights.convert to-torch-dist HF_FOLDER DIR
    python -m asyncrl.engines.megatron.weights.convert to-hf DIR HF_FOLDER --hf-checkpoint ORIGINAL
    python -m asyncrl.engines.megatron.weights.convert fsdp-to-hf DIR HF_FOLDER --hf-checkpoint ORIGINAL

``DIR`` gets a folder ``release`` and the file that names it, as Megatron's own converters write them.  ``--load DIR``
and ``--ref-load DIR`` then start from it, in any layout.  Weights are converted one at a time: memory is needed for the
largest one, a few times over, and not for the model.  Several processes share the work:

    torchrun --nproc-per-node 8 -m asyncrl.engines.megatron.weights.convert to-torch-dist HF_FOLDER DIR

``fsdp-to-hf`` reads a checkpoint that torch DCP wrote, such as FSDP's, in one process.  The flags of slime's converters
are accepted: ``--hf-checkpoint --save``, and ``--input-dir --output-dir --origin-hf-dir``.  No GPU is used.
"""

import argparse
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from asyncrl.engines.megatron.checkpoint.checked_files import INTERNALS as CHECKED_FILES
from asyncrl.engines.megatron.checkpoint.dist_files import INTERNALS as DIST_FILES
from asyncrl.engines.megatron.checkpoint.state import INTERNALS as STATE
from asyncrl.engines.megatron.model.attention import INTERNALS as ATTENTION
from asyncrl.engines.megatron.model.build import INTERNALS as MODEL
from asyncrl.engines.megatron.model.experts import INTERNALS as EXPERTS
from asyncrl.engines.megatron.model.layers import INTERNALS as LAYERS
from asyncrl.engines.megatron.model.mixture import INTERNALS as MIXTURE
from asyncrl.engines.megatron.setup.cpu_emulation import emulate_cuda
from asyncrl.engines.megatron.weights.conversion import to_hf, to_torch_dist
from asyncrl.engines.megatron.weights.convert_flags import parser, shape_of_flags
from asyncrl.engines.megatron.weights.fsdp_conversion import fsdp_to_hf
from asyncrl.engines.megatron.weights.hf_weights import INTERNALS as WEIGHTS
from asyncrl.engines.megatron.weights.meta_model import INTERNALS as META_MODEL
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.internals import check_internals


def main(argv: Sequence[str]) -> int:
    """Convert as ``argv`` asks, and return the exit code."""
    asked = parser(__doc__, argv).parse_args(argv)
    try:
        _convert(asked)
    except AsyncRLError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _convert(asked: argparse.Namespace) -> None:
    if asked.kind == "fsdp-to-hf":
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ConfigError("fsdp-to-hf runs in one process: start it without torchrun")
        fsdp_to_hf(
            asked.source,
            asked.target,
            asked.hf_checkpoint,
            add_missing=asked.add_missing_from_origin_hf,
            overwrite=asked.force,
        )
        return
    check_internals(ATTENTION, CHECKED_FILES, DIST_FILES, EXPERTS, LAYERS, META_MODEL, MIXTURE, MODEL, STATE, WEIGHTS)
    with _processes():
        if asked.kind == "to-hf":
            to_hf(asked.source, asked.target, asked.hf_checkpoint, asked.vocab_size)
        else:
            to_torch_dist(asked.source, asked.target, asked.vocab_size, shape_of_flags(asked))


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
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
