"""Random weights for each version: the log-probs of an answer tell which version generated it."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.engines.weight_sync.path_check import Meeting


def weight_set(model: Path, version: int) -> dict[str, Any]:
    """The model's weights for version 0; for any other, random weights of the same shapes."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(model / "model.safetensors")
    if version:
        draw = torch.Generator().manual_seed(version)
        for name in sorted(tensors):
            if tensors[name].ndim == 2:  # norms stay
                tensors[name] = 0.1 * torch.randn(tensors[name].shape, generator=draw)
    return tensors


def scaled(model: Path, version: int) -> dict[str, Any]:
    """The model with its output layer scaled, which keeps a KV cache valid under all versions."""
    from safetensors.torch import load_file

    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] *= 1.0 + 0.1 * version
    return tensors


class SendsWeights:
    """A trainer that sends the weights of ``version``, made by ``weights_of``."""

    def __init__(self, model: Path, weights_of: Callable[[Path, int], dict[str, Any]]) -> None:
        self.version = 0
        self._model = model
        self._weights_of = weights_of
        self._shapes = weights_of(model, 0)
        names = sorted(self._shapes)
        self._parts = [names[:10], names[10:]]

    async def weight_buckets(self) -> tuple[WeightBucket, ...]:
        return tuple(
            WeightBucket(
                names=tuple(names),
                dtypes=tuple(str(self._shapes[name].dtype).removeprefix("torch.") for name in names),
                shapes=tuple(tuple(self._shapes[name].shape) for name in names),
                num_bytes=sum(self._shapes[name].nbytes for name in names),
            )
            for names in self._parts
        )

    async def open_group(self, *, master_address: str, master_port: int, group_name: str) -> None:
        from asyncrl.engines.megatron.weights.update_group import GroupStore

        self._store = await asyncio.to_thread(GroupStore, master_address, master_port)

    async def join_engines(
        self, *, master_address: str, master_port: int, world_size: int, group_name: str, backend: str
    ) -> None:
        from asyncrl.engines.megatron.weights.update_group import join_update_group

        self._group = await asyncio.to_thread(join_update_group, self._store, world_size, group_name, backend, 30.0)

    async def join_parts(self, *, num_parts: int, world_size: int, group_name: str, backend: str) -> None:
        raise AssertionError("these engines have a single rank")

    async def meet_engine(self, where: Meeting, *, timeout_s: float) -> None:
        import torch

        from asyncrl.engines.megatron.weights.engine_meeting import meet_engine

        await asyncio.to_thread(meet_engine, where, torch.device("cpu"), timeout_s)

    async def snapshot(self, *, is_checked: bool, by_part: bool) -> bool:
        return False

    async def resend(self, *, is_checked: bool, by_part: bool) -> bool:
        raise AssertionError("no engine dies here")

    async def send(self, *, is_checked: bool, by_part: bool, timeout_s: float) -> None:
        await asyncio.to_thread(self._send, is_checked)

    async def abandon(self, group_name: str) -> None:
        raise AssertionError("no engine dies here")

    def _send(self, is_checked: bool) -> None:
        import torch.distributed as dist

        from asyncrl.engines.megatron.weights.update_group import flatten
        from asyncrl.engines.weight_sync.flat import checksum

        tensors = self._weights_of(self._model, self.version)
        for names in self._parts:
            flat = flatten(tensors[name] for name in names)
            for sent in (flat, checksum(flat)) if is_checked else (flat,):
                dist.broadcast(sent, src=0, group=self._group)


class WritesWeights(SendsWeights):
    """The same trainer, which also writes them to a disk."""

    async def write_weights(self, folder: Path, *, timeout_s: float) -> None:
        await asyncio.to_thread(self._write, folder)

    def _write(self, folder: Path) -> None:
        from asyncrl.engines.megatron.checkpoint.hf_files import replace_checkpoint

        replace_checkpoint(self._weights_of(self._model, self.version).items(), self._model, folder, {})


class Teacher:
    """A model of transformers that scores tokens under any version."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import Qwen3ForCausalLM

        self._model = model
        self._network = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)

    def scores(self, version: int, token_ids: Sequence[int], start: int) -> list[float]:
        """Log-probs of ``token_ids[start:]``, each given all tokens before it, under ``version`` alone."""
        return self.scores_with_old_caches([(version, len(token_ids))], token_ids, start)

    def scores_with_old_caches(
        self, edges: Sequence[tuple[int, int]], token_ids: Sequence[int], start: int
    ) -> list[float]:
        """The same when the tokens up to ``stop`` were generated under ``version``, for each pair of ``edges``.

        Caches are kept: the pass that generates a token reads the one before it, so each pass adds to a cache that
        older weights began.
        """
        import torch
        from transformers import DynamicCache

        cache, scores, begun = DynamicCache(), [], 0
        for version, stop in edges:
            self._network.load_state_dict(weight_set(self._model, version))
            with torch.no_grad(), _one_thread():
                inputs = torch.tensor([token_ids[begun : stop - 1]])
                logprobs = self._network(inputs, past_key_values=cache).logits.log_softmax(-1)[0]
            targets = torch.tensor(token_ids[begun + 1 : stop])
            scores += logprobs.gather(1, targets[:, None])[:, 0].tolist()
            begun = stop - 1
        return scores[start - 1 :]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread: two that spin next to a server on two cores took 18 times as long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
