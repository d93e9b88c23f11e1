"""The decision whether each engine rank gets only the experts that it holds.

The *expert parts* of an engine with expert parallelism P are its ranks 0 to P - 1 in SGLang's expert-parallel group.
The trainer plans buckets with the experts of one part each; SGLang decides which rank holds which experts.

    update 1     all buckets to all ranks, one by one ──▶ recorded: what each rank copies from each bucket
    update 2     all buckets to all ranks             ──▶ tested, and reported: the parts that need each bucket
    update 3 ... buckets of experts to their part, if no engine has reported another part that needs them

The placement of redundant and shared experts is therefore measured in the first two updates, never modelled.  Experts
must not move after that (--sglang-enable-eplb).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.types import RankBytes

_NAME = re.compile(r"(.+)/(\d+)-expert-parts")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """An engine's report on the buckets of a direct update."""

    num_parts: int
    """The engine's expert-parallel size."""
    needed_by: tuple[frozenset[int], ...]
    """For each bucket, the expert parts with a rank that needs any of its bytes."""
    bytes_per_rank: tuple[RankBytes, ...]
    """The bytes that each rank of the engine received in this update."""


def part_of_expert(expert: int, num_experts: int, num_parts: int) -> int:
    """Return the part of an expert if the parts hold equal ranges of experts in order."""
    return expert // (num_experts // num_parts)


def name_of_parts(group_name: str, num_parts: int) -> str:
    """Return the name under which trainer and engines join the groups of the parts of the update group."""
    return f"{group_name}/{num_parts}-expert-parts"


def asked_parts(name: str) -> tuple[str, int] | None:
    """Return the update group and the number of parts in a name from ``name_of_parts``; None for other names."""
    found = _NAME.fullmatch(name)
    return None if found is None else (found[1], int(found[2]))


def num_parts_of(buckets: Iterable[WeightBucket]) -> int:
    """Return the number of expert parts that the trainer planned ``buckets`` for; 1 if all ranks get all buckets."""
    return 1 + max((bucket.expert_part for bucket in buckets if bucket.expert_part is not None), default=0)


def obstacle(
    buckets: Sequence[WeightBucket], ranks: Mapping[str, int], reports: Mapping[str, EngineParts | None]
) -> str | None:
    """Return why the buckets cannot be sent by part, in one line; None if they can.

    ``ranks`` has the number of ranks of each engine, ``reports`` each engine's report, by URL.
    """
    num_parts = num_parts_of(buckets)
    for url, report in reports.items():
        if report is None:
            return f"{url} does not report which experts its ranks hold"
        if report.num_parts != num_parts:
            return f"{url} has an expert-parallel size of {report.num_parts}, the SGLang flags of the run {num_parts}"
        if ranks[url] != max(ranks.values()) or ranks[url] % num_parts:
            return f"{url} has {ranks[url]} ranks, which are not {num_parts} parts as large as those of other engines"
        for bucket, needed_by in zip(buckets, report.needed_by, strict=True):
            if bucket.expert_part is not None and (others := needed_by - {bucket.expert_part}):
                told = ", ".join(map(str, sorted(others)))
                return (
                    f"{url} holds weights of the bucket of {bucket.names[0]} in part {told}, expected in "
                    f"part {bucket.expert_part} alone"
                )
    return None


def worst_of(reports: Iterable[EngineParts | None]) -> RankBytes | None:
    """Return the bytes of the rank that received the most in relation to what it needs; None if none is known."""
    known = [each for report in reports if report is not None for each in report.bytes_per_rank]
    return max(known, key=lambda each: each.received / max(1, each.needed), default=None)
