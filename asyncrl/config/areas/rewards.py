"""The rewards of samples."""

import difflib
from dataclasses import dataclass
from typing import Annotated

from asyncrl.config.areas.ranges import above, at_least, must, refuse

GRADERS = ("number", "exact", "math", "deepscaler", "dapo", "f1", "gpqa", "ifeval", "random")
"""The built-in rewards that need no service."""
REMOTE = "remote_rm"
"""The built-in reward that a service computes."""
RM_TYPES = (*GRADERS, REMOTE)
BOXED = "boxed_"
"""A prefix of a built-in reward: only the content of the last ``\\boxed{}`` of the response is graded."""
WITHOUT_LABEL = ("random", "ifeval", REMOTE, "gpqa")
"""The built-in rewards for rows that may have no label."""
GRADE_WHOLE_TEXTS = ("exact", "number", "f1", "ifeval")
"""The built-in rewards that depend on all words of a response, and so on its special tokens."""
ENTRIES = {"dapo": ("score", "acc")}
"""The entries of a built-in dict reward that are numbers."""
DEFAULT_KEYS = {"dapo": "score"}
"""The entry of a built-in dict reward that is the reward without ``--reward-key``."""

_ABSENT = {
    "ifbench": "its constraints are not built in; give ifeval for the published IFEval instructions, or the IFBench "
    "package behind custom-rm-path"
}


def rm_type_problem(name: str) -> str | None:
    """Return the reason why ``name`` is no built-in reward, or None if it is one."""
    bare = name.removeprefix(BOXED)
    if bare in RM_TYPES:
        return None
    if bare in _ABSENT:
        return f'"{name}": {_ABSENT[bare]}'
    near = difflib.get_close_matches(bare.lower().replace("-", "_"), RM_TYPES, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "give any other reward as a function with --custom-rm-path"
    return f'must be one of {", ".join(RM_TYPES)}, got "{name}"; {hint}'


def key_problem(name: str, key: str | None) -> str | None:
    """Return the reason why ``key`` is no entry of a built-in reward, or None if it is one or the reward has none."""
    bare = name.removeprefix(BOXED)
    if key is None or key in ENTRIES.get(bare, (key,)):
        return None
    return f"reward-key {key} with {name}, which has {' and '.join(ENTRIES[bare])}; give one of them"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """The rewards of samples."""

    custom_rm_path: Annotated[
        str | None,
        "Reward function or class, in the notation of --dynamic-sampling-filter-path, or a file with one of them. "
        "Takes precedence over --rm-type.",
    ] = None
    rm_type: Annotated[
        str | None,
        "Built-in reward: number, exact, math, deepscaler, dapo, f1, gpqa, ifeval, remote_rm or random. With the "
        "prefix boxed_, only the last \\boxed{} is graded. A row's metadata may name another with the key rm_type.",
    ] = None
    rm_url: Annotated[str | None, "URL of the service of --rm-type remote_rm."] = None
    rm_concurrency: Annotated[int, "Maximum number of requests in flight to --rm-url."] = 64
    group_rm: Annotated[bool, "Call the reward function once per group, with all its samples."] = False
    reward_key: Annotated[str | None, "Entry of a dict reward that is the reward. Default: score with dapo."] = None
    eval_reward_key: Annotated[str | None, "Like --reward-key, for evaluation. Default: --reward-key."] = None
    reward_num_workers: Annotated[
        int | None, "Number of processes that grade responses. Default: half of the CPU cores, at most 16."
    ] = None
    reward_worker_memory_gb: Annotated[
        float, "Address space of a process that grades responses, in GB; class rewards have no limit."
    ] = 6.0

    def __post_init__(self) -> None:
        problem = None if self.rm_type is None else rm_type_problem(self.rm_type)
        refuse(
            must(problem is None, f"rm-type {problem}")
            + must(
                self.rm_url is None or self.rm_url.startswith(("http://", "https://")),
                f"rm-url must start with http:// or https://, got {self.rm_url!r}",
            )
            + at_least(self, 1, "reward_num_workers", "rm_concurrency")
            + above(self, 0, "reward_worker_memory_gb")
        )
