"""Models in any parallel layout, without a trainer around them.

    python -m tests.engines.megatron.layouts RANK WORLD_SIZE PORT CASES

The program is one of the ranks that call ``run``.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron_imports import megatron_imports

with megatron_imports():
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, model_parallel_cuda_manual_seed

    from asyncrl.engines.megatron.model.attention import packed_row
    from asyncrl.engines.megatron.model.build import build_model
    from asyncrl.engines.megatron.model.packing import Example, Packing, microbatches, part_of
    from asyncrl.engines.megatron.model.routing import RoutingReplay
    from asyncrl.engines.megatron.setup.cpu_emulation import emulate_cuda
    from asyncrl.engines.megatron.setup.gloo_device import share_gloo_device
    from asyncrl.engines.megatron.weights.fp8 import BlockFp8, fp8_of
    from asyncrl.engines.megatron.weights.gathering import whole_weights
    from asyncrl.engines.megatron.weights.hf_weights import (
        export_bucket,
        export_hf,
        load_hf,
        plan_buckets,
        splits_of,
        to_hf,
    )
    from asyncrl.engines.megatron.weights.sharding import all_weights, local_weights

from asyncrl.models.shape import ModelShape, read_shape
from asyncrl.token_columns import Routes

CPU = torch.device("cpu")
SEVERAL = 2**14
"""Message size in bytes: holds several, but not all, weights of a tiny model."""
DEADLINE_S = 360
"""Limit for a process that imports Megatron, which takes 10 to 50 s on two shared cores."""
VOCAB = 96
LENGTHS = (5, 37, 2, 20)
"""Lengths of the packed sequences: below and above the original contexts of the tiny Llama's and DeepSeek's RoPE."""

Tensors = dict[str, torch.Tensor]


@contextmanager
def processes(rank: int, world_size: int, port: int) -> Iterator[None]:
    """The process group of all ranks."""
    share_gloo_device()  # or the groups of every model that lives on would take CPU time until the process ends
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def layout(**sizes: int) -> Iterator[None]:
    """Megatron's groups: arguments of ``initialize_model_parallel``."""
    parallel_state.initialize_model_parallel(**sizes)
    emulate_cuda()
    model_parallel_cuda_manual_seed(0)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def loaded(checkpoint: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, ModelShape]:
    """The part of the model in ``checkpoint`` that this rank holds, and its shape."""
    shape = read_shape(checkpoint)
    model = build_model(shape, CPU, dtype)
    load_hf(model, shape, checkpoint)
    return model, shape


def sequences() -> list[torch.Tensor]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]


def examples(routes: Sequence[Routes | None]) -> list[Example]:
    """The ``sequences`` as samples with these routes.

    Half of each is the answer, every third of whose tokens is masked; its first half has the lag 2, the rest 0.
    """
    return [
        Example(
            index=index,
            token_ids=(*tokens.tolist(), 0),
            num_response=(count := len(tokens) // 2 + 1),
            loss_mask=tuple(int(place % 3 > 0) for place in range(count)),
            behaviour_logprobs=(0.0,) * count,
            lags=((2, 0, count // 2), (0, count // 2, count)),
            routes=routes[index],
        )
        for index, tokens in enumerate(sequences())
    ]


def logit_weights() -> torch.Tensor:
    """Random weights of the logits, whose weighted sum is the loss."""
    return torch.randn(sum(LENGTHS), VOCAB, generator=torch.Generator().manual_seed(2))


def logits_and_gradients(
    model: Any, shape: ModelShape, replay: RoutingReplay | None = None, routes: Sequence[Routes | None] = ()
) -> tuple[torch.Tensor | None, Tensors]:
    """Compute both for the packed ``sequences``: logits on the last pipeline stage, gradients by checkpoint name.

    ``routes`` are those of each sequence, for ``replay``.
    """
    parallel = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    model.config.finalize_model_grads_func = lambda models, tokens, **groups: finalize_model_grads(
        models, None, **groups
    )
    parallel.zero_grad_buffer()
    outcomes = get_forward_backward_func()(
        forward_step_func=partial(_step, replay),
        data_iterator=iter([routes or [None] * len(LENGTHS)]),
        model=parallel,
        num_microbatches=1,
        seq_length=sum(LENGTHS),
        micro_batch_size=1,
        forward_only=False,
    )
    parts: dict[str, Any] = local_weights(model)
    grads = {name: part.main_grad for name, part in parts.items() if part.requires_grad}
    splits = splits_of(shape)
    copies = parallel_state.get_data_parallel_world_size()  # every copy of the model saw the same tokens
    found = whole_weights(grads, all_weights(grads, splits), splits, CPU, SEVERAL)
    by_name = {hf: part / copies for name, grad in found for hf, part in to_hf(name, grad, shape)}
    return (outcomes[0] if outcomes else None), by_name


def _step(
    replay: RoutingReplay | None, rows: Iterator[Sequence[Routes | None]], model: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]]:
    routes = next(rows)
    (row,) = microbatches(examples(routes), 0, 1, Packing(max_tokens=sum(LENGTHS)))
    positions = torch.from_numpy(row.positions_T)
    replayed = None if replay is None else replay.row_routes(row, part_of(row, 0, 1).places_T, CPU)
    packed = packed_row(row, CPU, model.module.rotary_angles(positions), 0, 1, replayed)
    output = model(torch.from_numpy(row.token_ids_T)[None], positions[None], None, packed_seq_params=packed)
    return output, _weighted_sum


def _weighted_sum(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    group = parallel_state.get_tensor_model_parallel_group()
    mine = logit_weights().chunk(group.size(), dim=1)[group.rank()]
    whole = gather_from_tensor_model_parallel_region(logits.detach(), group=group)
    return (logits[0] * mine).sum(), torch.zeros((), dtype=torch.int), whole[0]


def run(rank: int, world_size: int, port: int, cases: list[tuple[dict[str, int], str]]) -> list[dict[str, Any]]:
    """Load each checkpoint in its layout; return the results that this rank has."""
    found = []
    with processes(rank, world_size, port):
        for sizes, checkpoint in cases:
            with layout(**sizes):
                found.append(_seen(Path(checkpoint)))
    return found


def fp8_sent(model: Any, shape: ModelShape, fp8: BlockFp8) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of all buckets, as they are sent to engines that serve fp8."""
    _, plan = plan_buckets(model, shape, 8_000, fp8)
    for weights in plan:
        yield from export_bucket(model, shape, weights, fp8)


def _seen(checkpoint: Path) -> dict[str, Any]:
    model, shape = loaded(checkpoint)
    fp8 = fp8_of(checkpoint, shape)
    tensors = export_hf(model, shape) if fp8 is None else fp8_sent(model, shape, fp8)
    exported = {name: tensor.clone() for name, tensor in tensors}
    held = sum(part.numel() for part in local_weights(model).values())
    logits, grads = logits_and_gradients(model, shape)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        logits = None
    return {"exported": exported, "held": held, "logits": logits, "grads": grads}


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, world_size, port, cases = sys.argv[1:]
    run(int(rank), int(world_size), int(port), json.loads(cases))
