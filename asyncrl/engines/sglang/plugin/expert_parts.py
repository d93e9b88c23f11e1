"""The expert part of this rank: the group over which its experts arrive, and the report of what it needs.

The driver compares the reports of all engines with its plan (``asyncrl.engines.weight_sync.expert_parts``).

Invariant: as in ``direct``, only the scheduler's thread calls these functions.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.engines.sglang.labels import EXPERT_PARTS
from asyncrl.engines.sglang.plugin.arrival import Channel
from asyncrl.engines.weight_sync.expert_parts import asked_parts, name_of_parts
from asyncrl.internals import Internal

_STATE = "sglang.srt.distributed.parallel_state"

INTERNALS = (
    Internal(name=f"{_STATE}.get_moe_expert_parallel_world_size", parameters=(), used_in=__name__),
    Internal(name=f"{_STATE}.get_moe_expert_parallel_rank", parameters=(), used_in=__name__),
    Internal(name=f"{_STATE}.get_world_group", used_in=__name__),
    Internal(name=f"{_STATE}.GroupCoordinator", attributes=("cpu_group",), used_in=__name__),
)
"""Names that may change with the library: see docs/internals.md."""

COLLECTIVES_S = 1800.0
"""The timeout of a part group's collectives with gloo, in seconds: torch's default, as for the main group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPart:
    """The place of this rank in SGLang's expert-parallel group."""

    number: int = 0
    num_parts: int = 1


def ranks_of_this_engine() -> Any:
    """Return SGLang's CPU group of all ranks of this engine; None for a single rank."""
    import torch.distributed as dist

    if dist.get_world_size() == 1:
        return None
    from sglang.srt.distributed.parallel_state import get_world_group

    return get_world_group().cpu_group


def part_of_this_rank() -> ExpertPart:
    """Return the expert part of this rank.  An engine of a single rank has one part."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ExpertPart()
    from sglang.srt.distributed import parallel_state

    return ExpertPart(
        number=parallel_state.get_moe_expert_parallel_rank(),
        num_parts=parallel_state.get_moe_expert_parallel_world_size(),
    )


def join_part(groups: dict[str, Any], name: str, rank_offset: int, world_size: int, backend: str) -> None:
    """Join the group of this rank's part, and add it to ``groups``.  Collective over the engine's ranks.

    ``rank_offset`` is the first rank of this engine in each part's group.  Raises ValueError on all ranks if ``name``
    asks for another number of parts than this engine has, or if the parts are not equally large.
    """
    from asyncrl.engines.weight_sync.part_groups import join_as_engine

    asked, part, ranks = asked_parts(name), part_of_this_rank(), ranks_of_this_engine()
    if asked is None or asked[1] != part.num_parts:
        raise ValueError(f"this engine has {part.num_parts} expert parts, the update group {name} asks for others")
    numbers = [number for (number,) in everyones([part.number], ranks)]
    if len({numbers.count(number) for number in range(part.num_parts)}) > 1:
        raise ValueError(f"the expert parts {numbers} of this engine's ranks are not equally large")
    here = 0 if ranks is None else _rank_in(ranks)
    groups[name] = join_as_engine(
        groups[asked[0]],
        part.number,
        rank_offset + numbers[:here].count(part.number),
        world_size,
        name=name,
        backend=backend,
        timeout_s=COLLECTIVES_S,
    )


def channels(
    groups: dict[str, Any], group_name: str, parts: Sequence[Sequence[int]] | None, num_buckets: int
) -> list[Channel | None]:
    """Return the channel on which each bucket arrives; None for a bucket of another part, which does not arrive.

    ``parts`` has the part of each bucket, or nothing for all ranks; None sends all buckets to all ranks.  Raises
    ValueError if this rank has not joined its part's group.
    """
    main, part = groups[group_name], part_of_this_rank()
    if parts is None:
        return [Channel(group=main, main=main)] * num_buckets
    group = groups.get(name_of_parts(group_name, part.num_parts))
    if group is None:
        raise ValueError(f"this rank is not in the group of its expert part, below {group_name}")
    whole, own = (Channel(group=each, main=main, others=(group,)) for each in (main, group))
    return [whole if not asked else own if asked[0] == part.number else None for asked in parts]


def report(needs: Sequence[bool], received: int, needed: int, ranks: Any) -> str:
    """Return what the driver gets to know of an update; empty without expert parallelism.  Collective over ``ranks``.

    ``needs`` tells for each bucket whether this rank needs it, ``received`` and ``needed`` are in bytes.
    """
    part = part_of_this_rank()
    if part.num_parts == 1:
        return ""
    rows = everyones([part.number, received, needed, *needs], ranks)
    parts, num_bytes = [0] * len(needs), [row[1:3] for row in rows]
    for number, _, _, *needs_there in rows:
        parts = [known | is_needed << number for known, is_needed in zip(parts, needs_there, strict=True)]
    told = {"num_parts": part.num_parts, "needs": parts, "bytes": num_bytes}
    return f"{EXPERT_PARTS}{json.dumps(told)}"


def everyones(mine: Sequence[int], ranks: Any) -> list[list[int]]:
    """Gather the numbers of all ranks, in the order of ranks.  Collective over ``ranks``; all have as many numbers."""
    import torch
    import torch.distributed as dist

    if ranks is None:
        return [list(mine)]
    here = torch.tensor(mine, dtype=torch.int64)
    found = [torch.empty_like(here) for _ in range(dist.get_world_size(ranks))]
    dist.all_gather(found, here, group=ranks)
    return [each.tolist() for each in found]


def _rank_in(ranks: Any) -> int:
    import torch.distributed as dist

    return dist.get_rank(ranks)
