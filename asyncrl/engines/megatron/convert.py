"""Between a Hugging Face folder and Megatron's torch_dist format, without a run.

    python -m asyncrl.engines.megatron.convert to-torch-dist HF_FOLDER DIR
    python -m asyncrl.engines.megatron.convert to-hf DIR HF_FOLDER --hf-checkpoint ORIGINAL

``DIR`` gets ``release`` and the file that names it, as Megatron's own converters write them: ``--load DIR`` or
``--ref-load DIR`` then starts from it.  A model that does not fit into the memory of one process is split over several:

    torchrun --nproc-per-node 8 -m asyncrl.engines.megatron.convert to-torch-dist ... --pipeline-model-parallel-size 8

The layout of a conversion says nothing about that of a run.  No GPU is used.
"""

import argparse
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed.checkpoint.api import CheckpointException

from asyncrl.engines.checkpoints import RELEASE, TRACKER, check_model, find_weights, notes_of, read_notes, write_release
from asyncrl.engines.megatron import cpu
from asyncrl.engines.megatron.model import build_model
from asyncrl.engines.megatron.shape import ModelShape, read_shape
from asyncrl.engines.megatron.state import sharded_weights
from asyncrl.engines.megatron.weights import load_hf, save_hf
from asyncrl.errors import AsyncRLError, CheckpointFailed, ConfigError

SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


def main(argv: Sequence[str]) -> int:
    """Convert what ``argv`` asks for; the exit code."""
    asked = _parser().parse_args(argv)
    try:
        with _processes({name: getattr(asked, name) for name in SIZES}):
            asked.convert(asked)
    except AsyncRLError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def to_torch_dist(source: Path, target: Path) -> None:
    """Write the weights of the Hugging Face folder ``source`` to ``target/release``.  Collective.

    Raises ConfigError or CheckpointFailed.
    """
    if (target / TRACKER).exists():
        raise ConfigError(f"{target} has checkpoints already: convert to an empty folder")
    shape = read_shape(source)
    model = _model(shape)
    load_hf(model, shape, source)
    folder = target / RELEASE
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    try:
        dist_checkpointing.save(sharded_weights(model), str(folder))
    except (OSError, RuntimeError, CheckpointException) as error:
        raise CheckpointFailed(f"{folder} cannot be written: {error}") from error
    if dist.get_rank() == 0:
        write_release(folder, notes_of(shape, {}))
    dist.barrier()


def to_hf(source: Path, target: Path, original: Path) -> None:
    """Write the weights of the newest checkpoint in ``source`` as the Hugging Face folder ``target``.  Collective.

    ``original`` is the Hugging Face folder that the training began with: its config, tokenizer and dtypes are taken.
    Raises ConfigError or CheckpointFailed.
    """
    shape, folder = read_shape(original), find_weights(source)
    if (notes := read_notes(folder)) is not None:
        check_model(folder, notes["model"], shape)
    model = _model(shape)
    try:
        model.load_state_dict(dist_checkpointing.load(sharded_weights(model), str(folder))["model"])
    except (CheckpointException, CheckpointingException, KeyError, RuntimeError, OSError) as error:
        raise CheckpointFailed(f"{folder} cannot be loaded: {str(error).splitlines()[0]}") from error
    save_hf(model, shape, original, target)


def _model(shape: ModelShape) -> GPTModel:
    """This process's part, in the dtype of the Hugging Face folder."""
    return build_model(shape, torch.device("cpu"), getattr(torch, shape.dtype))


@contextmanager
def _processes(sizes: dict[str, int]) -> Iterator[None]:
    """All processes that torchrun started, or this one alone, in the layout ``sizes``.  Raises ConfigError."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{_free_port()}", rank=0, world_size=1)
    try:
        try:
            parallel_state.initialize_model_parallel(**sizes)
        except (RuntimeError, AssertionError) as error:
            given = ", ".join(f"{name.replace('_', '-')} {size}" for name, size in sizes.items() if size > 1)
            raise ConfigError(f"{dist.get_world_size()} processes do not make {given}: {error}") from error
        cpu.install()
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
    into = kinds.add_parser("to-torch-dist", help="weights of a Hugging Face folder, for --load and --ref-load")
    into.set_defaults(convert=lambda asked: to_torch_dist(asked.source, asked.target))
    back = kinds.add_parser("to-hf", help="weights of the newest checkpoint in a folder, for everybody else")
    back.set_defaults(convert=lambda asked: to_hf(asked.source, asked.target, asked.hf_checkpoint))
    back.add_argument("--hf-checkpoint", type=Path, required=True, help="folder that the training began with")
    for kind in (into, back):
        kind.add_argument("source", type=Path)
        kind.add_argument("target", type=Path)
        for name in SIZES:
            kind.add_argument(f"--{name.replace('_', '-')}", type=int, default=1, help="of this conversion")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
