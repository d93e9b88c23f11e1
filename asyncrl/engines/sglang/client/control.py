"""Control commands for one SGLang server: readiness, pausing, weight updates and memory."""

import asyncio
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.client.payload import UNREADABLE
from asyncrl.engines.sglang.installed_plugins import EnginePlugins, read_plugins
from asyncrl.engines.sglang.labels import (
    DIRECT,
    DIRECT_BY_PART,
    DIRECT_BY_PART_CHECKED,
    DIRECT_CHECKED,
    EXPERT_PARTS,
    NOT_REPLAYED,
    RECORDED,
    STOOD_STILL,
)
from asyncrl.engines.slow_engines import DecodingSpeed
from asyncrl.engines.weight_sync.broadcast import Received
from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.engines.weight_sync.expert_parts import EngineParts
from asyncrl.engines.weight_sync.path_check import MET, Meeting
from asyncrl.engines.weight_sync.round import PauseMode
from asyncrl.errors import EngineError, EngineRejected, EngineTimeout
from asyncrl.event_loop import Deadline
from asyncrl.types import RankBytes

logger = logging.getLogger(__name__)

_PROBE_S = 5.0
"""Deadline in seconds of one readiness probe; the server may not listen yet."""
_GRACE_S = 1.0
"""Seconds by which the server's own deadline for becoming empty ends before ours, so that it can report the failure."""
_PERIOD_S = 0.25
"""Seconds between two readiness probes."""
_BUCKETS = re.compile(re.escape(NOT_REPLAYED) + r"(\[.*?\])")
_SECONDS = re.compile(re.escape(STOOD_STILL) + r"([\d.]+\d)")


class EngineControl:
    """The control commands of the server at ``url``, each with a deadline of ``timeout_s``.

    Every method except ``get_ready`` raises EngineTimeout, EngineLost or EngineRejected.
    """

    def __init__(self, http: HttpClient, url: str, *, timeout_s: float, num_ranks: int = 1) -> None:
        self.url = url
        self.num_ranks = num_ranks
        """Ranks of this server in a weight-update group: its tensor-parallel size."""
        self._http = http
        self._timeout_s = timeout_s

    async def get_ready(self, timeout_s: float) -> None:
        """Return once the server generates and its garbage collectors skip the objects that it has loaded.

        Otherwise each full collection stops the server for 0.5 s or more and finds nothing (``asyncrl.app.gc_tuning``).
        A server that cannot freeze these objects still counts as ready.  Raises EngineTimeout after ``timeout_s``, and
        ForeignServer if the server is not of this run.
        """
        await wait_for_server(self._http, self.url, timeout_s)
        try:
            await self._http.tell(f"{self.url}/freeze_gc", self._timeout_s)
        except EngineError as error:  # if the server has ended, the supervisor reports the cause
            logger.warning("%s: its garbage collectors are as they were: %s", self.url, error)

    async def pause(self, mode: PauseMode) -> None:
        """Hold every request where it is.  ``mode`` is explicit because SGLang's default aborts all requests."""
        await self._post("pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        """Resume the requests that ``pause`` held."""
        await self._post("continue_generation", {})

    async def probe(self, timeout_s: float) -> None:
        """Return once the scheduler answers, which it does between two forward passes, also while paused.

        The scheduler answers this request itself; SGLang's HTTP process answers most others, including ``/v1/loads``.
        """
        await self._http.look(f"{self.url}/server_info", timeout_s)

    async def decoding_speed(self, timeout_s: float) -> DecodingSpeed | None:
        """Return the speed that the scheduler measured last; None from an SGLang that reports none."""
        state = await self._http.look(f"{self.url}/server_info", timeout_s)
        load = await self._http.look(f"{self.url}/v1/loads?include=core", timeout_s)
        return _speed(state, load)

    async def plugins(self) -> EnginePlugins:
        """Return the state of our plug-ins.  Any SGLang answers this, with no entry if none of them is installed."""
        return read_plugins(await self._http.look(f"{self.url}/server_info", self._timeout_s))

    async def join_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a weight-update group; return once all its ranks have joined."""
        await self._join(master_address, master_port, rank_offset, world_size, group_name, backend)

    async def meet_trainer(self, where: Meeting) -> bool:
        """See ``WeightReceiver.meet_trainer``; only the plug-in ``direct`` knows such groups."""
        answer = await self._join(
            where.master_address, where.master_port, 1, where.world_size, where.group_name, where.backend
        )
        return MET in str(answer.get("message"))

    async def join_parts(self, *, rank_offset: int, world_size: int, group_name: str, backend: str) -> None:
        """Join the groups of this server's expert parts, which the plug-in ``direct`` makes over the main group."""
        await self._join("", 0, rank_offset, world_size, group_name, backend)

    async def receive_bucket(self, bucket: WeightBucket, *, group_name: str, label: str | None) -> Received:
        """Receive one bucket from the group's rank 0 and load it; ``label`` becomes the weight version.

        The plug-in ``direct``, if active, remembers the bucket for ``receive_all``.
        The cache is not flushed: flushing fails while requests are held, and in one mode kills the server.
        """
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        answer = await self._post(
            "update_weights_from_distributed", body if label is None else {**body, "weight_version": label}
        )
        return _received(answer)

    async def receive_all(
        self, buckets: Sequence[WeightBucket], *, group_name: str, label: str, is_checked: bool, by_part: bool
    ) -> Received:
        """Receive and load all buckets in one request; ``label`` becomes the weight version.

        The plug-in must have kept each of them in ``receive_bucket``.
        """
        whole, in_parts = (DIRECT_CHECKED, DIRECT_BY_PART_CHECKED) if is_checked else (DIRECT, DIRECT_BY_PART)
        parts = [[] if bucket.expert_part is None else [bucket.expert_part] for bucket in buckets]
        body = {
            "names": [bucket.names[0] for bucket in buckets],
            "dtypes": [],
            "shapes": parts if by_part else [],
            "group_name": group_name,
            "load_format": in_parts if by_part else whole,
            "flush_cache": False,
            "weight_version": label,
        }
        return _received(await self._post("update_weights_from_distributed", body))

    async def receive_handles(self, handles: Sequence[str], *, label: str | None) -> None:
        """Load the tensors behind the CUDA IPC handles, one handle per rank; ``label`` becomes the weight version."""
        body = {"serialized_named_tensors": list(handles), "load_format": "flattened_bucket", "flush_cache": False}
        await self._post("update_weights_from_tensor", body if label is None else {**body, "weight_version": label})

    async def empty(self) -> None:
        """Return once the server has no requests and has flushed their KV cache."""
        patience_s = max(self._timeout_s - _GRACE_S, self._timeout_s / 2)
        await self._http.tell(f"{self.url}/flush_cache?timeout={patience_s:g}", self._timeout_s)

    async def release(self, parts: Sequence[str]) -> None:
        """Release GPU memory.  Crashes the server if it has running requests (assertion in SGLang 0.5.16)."""
        await self._post("release_memory_occupation", {"tags": list(parts)})

    async def resume(self, parts: Sequence[str]) -> None:
        """Allocate released GPU memory again.  Crashes the server if the memory is not released."""
        await self._post("resume_memory_occupation", {"tags": list(parts)})

    async def receive_folder(self, folder: Path, *, label: str, timeout_s: float) -> float | None:
        """Read all weights from the safetensors in ``folder``; ``label`` becomes the weight version.

        Returns the seconds since the last forward pass ended, or None if the server does not know.  They may begin
        after ``pause`` has returned.

        ``load_format`` is explicit because the server may have started with another one; for ``flush_cache`` see
        ``receive_bucket``.
        """
        body = {"model_path": str(folder), "load_format": "auto", "flush_cache": False, "weight_version": label}
        return _still_s(await self._post("update_weights_from_disk", body, timeout_s))

    async def _join(
        self, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> dict[str, object]:
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        return await self._post("init_weights_update_group", body)

    async def _post(self, name: str, body: dict[str, object], timeout_s: float | None = None) -> dict[str, object]:
        answer = await self._http.command(f"{self.url}/{name}", body, timeout_s or self._timeout_s)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineRejected(f"{self.url}/{name}: {answer.get('message')}")
        return answer if isinstance(answer, dict) else {}


def _received(answer: Mapping[str, object]) -> Received:
    """Read the answer of the plug-in ``direct``, if it is active.

    Of several schedulers, buckets that any of them no longer replays count.
    """
    message = str(answer.get("message"))
    names = {name for found in _BUCKETS.findall(message) for name in json.loads(found)}
    return Received(
        is_recorded=RECORDED in message,
        still_s=_still_s(answer),
        not_replayed=tuple(sorted(names)),
        parts=_parts(message),
    )


def _parts(message: str) -> EngineParts | None:
    """Read the engine's expert parts.  All schedulers of an engine report the same."""
    _, label, rest = message.partition(EXPERT_PARTS)
    if not label:
        return None
    told, _ = json.JSONDecoder().raw_decode(rest)
    return EngineParts(
        num_parts=told["num_parts"],
        needed_by=tuple(
            frozenset(part for part in range(told["num_parts"]) if needs >> part & 1) for needs in told["needs"]
        ),
        bytes_per_rank=tuple(RankBytes(received=received, needed=needed) for received, needed in told["bytes"]),
    )


def _still_s(answer: Mapping[str, object]) -> float | None:
    """Read the plug-in ``stamps``'s pause in seconds; the longest of several schedulers, None without the plug-in."""
    return max(map(float, _SECONDS.findall(str(answer.get("message")))), default=None)


def _speed(state: Any, load: Any) -> DecodingSpeed | None:
    """Read the speed of an engine, over all its data-parallel ranks."""
    try:
        return DecodingSpeed(
            tokens_per_s=sum(float(rank["last_gen_throughput"]) for rank in state["internal_states"]),
            running=sum(int(rank["num_running_reqs"]) for rank in load["loads"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


async def wait_for_server(http: HttpClient, url: str, timeout_s: float) -> None:
    """Return once the server, which must know the client's key, generates.

    ``/health`` answers everybody, so it shows nothing about whose server it is.  Raises EngineTimeout or ForeignServer.
    """
    await _poll(http, f"{url}/health", timeout_s, lambda answer: True, keyed=f"{url}/model_info")


async def wait_for_router(http: HttpClient, url: str, engine_urls: tuple[str, ...], timeout_s: float) -> None:
    """Return once the router, which must know the client's key, lists every engine as healthy.

    Raises EngineTimeout or ForeignServer.
    """

    def lists_all(answer: Any) -> bool:
        try:
            listed = {worker["url"] for worker in answer["workers"] if worker["is_healthy"]}
        except UNREADABLE:
            return False
        return set(engine_urls) <= listed

    await _poll(http, f"{url}/workers", timeout_s, lists_all, keyed=f"{url}/workers")


async def _poll(
    http: HttpClient, url: str, timeout_s: float, is_ready: Callable[[object], bool], *, keyed: str
) -> None:
    """Ask ``url`` until ``is_ready``; before the first question the server at ``keyed`` must know the key."""
    last, is_ours = "it has not answered yet", False
    try:
        async with Deadline(timeout_s):
            while True:
                try:
                    if not is_ours:
                        await http.check_key(keyed, _PROBE_S)
                        is_ours = True
                    answer = await http.look(url, _PROBE_S)
                except EngineError as error:
                    last = str(error)
                else:
                    if is_ready(answer):
                        return
                    last = f"its last answer was {answer}"
                await asyncio.sleep(_PERIOD_S)
    except TimeoutError as error:
        raise EngineTimeout(f"{url} was not ready after {timeout_s:g} s; {last}") from error
