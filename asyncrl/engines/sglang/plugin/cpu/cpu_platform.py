"""The CPU platform that ``platform.activate`` offers to SGLang.

Five functions are replaced through SGLang's hook registry:

- Sampling a token with a per-request seed, which upstream only has as a Triton kernel.
- Sampling within top-k, top-p and min-p, where upstream's result depends on the other requests of the batch, and min-p
  with a seed ends the server.
- The buffer of experts' routes, which upstream pins for a GPU.
- The switch to batch-invariant kernels, which need Triton; on a CPU, float32 rows do not depend on the batch anyway.
- The communicator of NCCL, which a server of several ranks makes wherever it finds the library, and which needs GPUs.

With these, ``sampling_seed`` repeats a sample on a CPU.

A sixth one returns a copy where ``route_store`` is off: with overlap scheduling, the next pass would overwrite the
experts that a pass chose before they are read.  On a GPU they are copied to the host meanwhile.

A seventh one gets other arguments: with expert parallelism, upstream marks the experts of other ranks by -1, which the
native layer takes for an index.

An eighth function is changed: scheduler and detokenizer are forked from the server, which has imported everything.
SGLang spawns them, as CUDA requires, so that each imports everything again.  With a fork a start takes 0.4 of the CPU
time.

SGLang creates the platform while it is itself half imported, hence the imports inside methods.
"""

import multiprocessing
from collections.abc import Callable
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from asyncrl.engines.sglang.plugin.cpu.draw import draw_with_seed, draw_within_limits
from asyncrl.internals import Internal

_NCCL = "sglang.srt.distributed.device_communicators.pynccl.PyNcclCommunicator.__init__"
_EXPERTS = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"

INTERNALS = (
    Internal(
        name="sglang.srt.layers.sampler.multinomial_with_seed",
        parameters=("logprobs", "seed", "positions"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name="sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        parameters=("probs", "top_ks", "top_ps", "min_ps", "need_min_p_sampling", "sampling_seed", "positions"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name="sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        parameters=("self",),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name="sglang.srt.entrypoints.engine._set_envs_and_config",
        parameters=("server_args",),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name="sglang.srt.state_capturer.base.BaseHostCache.__init__",
        parameters=("self", "num_tokens", "num_layers", "topk_size", "name"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(name="sglang.srt.state_capturer.base.BaseHostCache", attributes=("buffer",), used_in=__name__),
    Internal(name="sglang.srt.state_capturer.base.BaseTopkCapturer.on_forward_end", used_in=__name__),
    Internal(name="sglang.srt.state_capturer.base.TopkCaptureOutput", attributes=("topk",), used_in=__name__),
    Internal(name=_NCCL, parameters=("self", "group", "device", "library_path"), is_exact=True, used_in=__name__),
    Internal(
        name=_EXPERTS,
        parameters=("layer", "x", "topk_output", "moe_runner_config"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name="sglang.srt.layers.moe.topk.StandardTopKOutput",
        attributes=("topk_weights", "topk_ids", "_replace"),
        used_in=__name__,
    ),
    Internal(name="sglang.srt.mem_cache.memory_pool.MHATokenToKVPool", used_in=__name__),
    Internal(
        name="sglang.srt.platforms.interface.SRTPlatform",
        attributes=(
            "apply_server_args_defaults",
            "get_default_attention_backend",
            "get_dispatch_key_name",
            "get_mha_kv_pool_cls",
            "get_paged_allocator_cls",
            "is_pin_memory_available",
        ),
        used_in=__name__,
    ),
    Internal(name="sglang.srt.platforms.interface.PlatformEnum", attributes=("OOT",), used_in=__name__),
    Internal(name="sglang.srt.platforms.cpu.CpuDeviceMixin", used_in=__name__),
    Internal(
        name="sglang.srt.plugins.hook_registry.HookRegistry.register",
        parameters=("target", "hook", "hook_type"),
        used_in=__name__,
    ),
    Internal(name="sglang.srt.server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES", used_in=__name__),
    Internal(name="sglang.srt.server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND", used_in=__name__),
    Internal(
        name="sglang.srt.server_args.ServerArgs",
        attributes=(
            "attention_backend",
            "dp_size",
            "enable_deterministic_inference",
            "enable_memory_saver",
            "numa_node",
            "sampling_backend",
        ),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md.

They are not checked at start, because SGLang is half imported then.
"""

ATTENTION_BACKEND = "torch_native"


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # sglang is untyped
    """Plain torch operations on a CPU."""

    _enum = PlatformEnum.OOT

    def __init__(self) -> None:
        replace = HookType.REPLACE
        HookRegistry.register("sglang.srt.layers.sampler.multinomial_with_seed", draw_with_seed, replace)
        HookRegistry.register(
            "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch", draw_within_limits, replace
        )
        HookRegistry.register(
            "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
            _leave_kernels_alone,
            replace,
        )
        HookRegistry.register("sglang.srt.state_capturer.base.BaseHostCache.__init__", _make_unpinned, replace)
        HookRegistry.register(
            "sglang.srt.state_capturer.base.BaseTopkCapturer.on_forward_end", _copy_experts, HookType.AROUND
        )
        HookRegistry.register(_EXPERTS, _skip_experts_elsewhere, HookType.AROUND)
        HookRegistry.register(_NCCL, _make_no_communicator, replace)
        HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork_children, HookType.AFTER)

    def is_pin_memory_available(self, device: object = None) -> bool:
        """Return False: there is no GPU to pin memory for."""
        return False

    def get_default_attention_backend(self) -> str:
        """Return the name of attention in plain torch."""
        return ATTENTION_BACKEND

    def get_dispatch_key_name(self) -> str:
        """Return the key of the ``forward_<key>`` that layers run."""
        return "native"

    def get_mha_kv_pool_cls(self) -> type[Any]:
        """Return the stock KV pool."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool  # type: ignore[no-any-return]

    def get_paged_allocator_cls(self) -> type[Any]:
        """Return the stock allocator of single tokens."""
        from asyncrl.engines.sglang.plugin.cpu.allocator import TokenAllocator

        return TokenAllocator

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Choose plain torch everywhere, and sampling that a seed repeats."""
        from sglang.srt import server_args as sglang_args

        for choices in (
            sglang_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
            sglang_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
        ):
            if ATTENTION_BACKEND not in choices:
                choices.append(ATTENTION_BACKEND)
        server_args.attention_backend = ATTENTION_BACKEND
        server_args.sampling_backend = "pytorch"
        server_args.enable_deterministic_inference = True


def _fork_children(result: None, server_args: Any) -> None:
    """Set the start method to fork, after SGLang has set its own and right before it starts the processes.

    Skipped where SGLang needs new programs (NUMA nodes, the memory saver) or starts processes from threads (data
    parallelism).
    """
    # Invariant: fork only where no other thread of the server may hold a lock, which would stay taken in the child for
    # good.  Hence not with data parallelism.
    if server_args.dp_size == 1 and server_args.numa_node is None and not server_args.enable_memory_saver:
        multiprocessing.set_start_method("fork", force=True)


def _make_unpinned(cache: Any, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
    """Initialise a ``BaseHostCache`` in plain memory: without a GPU, pinning ends the server at its start."""
    import torch

    cache.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    cache.num_tokens, cache.num_layers, cache.topk_size, cache.name = num_tokens, num_layers, topk_size, name


def _make_no_communicator(communicator: Any, group: object, device: object, library_path: str | None = None) -> None:
    """Initialise a ``PyNcclCommunicator`` that is never used, as SGLang does where it finds no NCCL."""
    communicator.available, communicator.disabled = False, True


def _skip_experts_elsewhere(forward: Callable[..., Any], layer: Any, x: Any, topk_output: Any, config: Any) -> Any:
    """Leave out the experts of other ranks, which have the number -1; the ranks' sums are added later.

    One choice of all tokens at a time, because ``forward`` needs the same number of experts for each token.
    """
    import torch

    weights, experts = topk_output.topk_weights, topk_output.topk_ids
    if not bool((experts < 0).any()):
        return forward(layer, x, topk_output, config)
    total = torch.zeros_like(x)
    for choice in range(experts.shape[1]):
        here = (experts[:, choice] >= 0).nonzero()[:, 0]
        if len(here):
            one = slice(choice, choice + 1)
            chosen = topk_output._replace(topk_weights=weights[here, one], topk_ids=experts[here, one])
            total.index_add_(0, here, forward(layer, x[here], chosen, config))
    return total


def _copy_experts(end: Callable[..., Any], *args: Any, **named: Any) -> Any:
    found = end(*args, **named)
    if found is not None:
        found.topk = found.topk.clone()
    return found


def _leave_kernels_alone(model_runner: object) -> None:
    return None
