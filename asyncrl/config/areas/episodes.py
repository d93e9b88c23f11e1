"""Generation by user functions: multi-turn episodes, tools and agents."""

from dataclasses import dataclass
from typing import Annotated

from asyncrl.config.areas.ranges import above, at_least, must, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeConfig:
    """Generation by user functions: multi-turn episodes, tools and agents."""

    custom_generate_function_path: Annotated[
        str | None,
        "Function or environment class that generates the samples of a prompt, in the notation of "
        "--dynamic-sampling-filter-path; docs/guides/multi_turn.md has its signatures. Default: one turn per sample.",
    ] = None
    agent_command: Annotated[
        str | None,
        "Command that is started once per sample and reaches the model through OPENAI_BASE_URL and OPENAI_API_KEY, in "
        "place of --custom-generate-function-path.",
    ] = None
    max_turns: Annotated[int | None, "Maximum number of engine calls of one episode. Default: no limit."] = None
    rollout_max_context_len: Annotated[
        int | None,
        "Maximum number of tokens of a prompt with all turns and observations. Prompts without room for a response are "
        "left out, also without episodes. Default: the model's positions.",
    ] = None
    max_episodes: Annotated[
        int | None,
        "Maximum number of episodes in progress, on engines or in tools. Default: four times the slots.",
    ] = None
    episode_timeout_s: Annotated[float, "Time limit for one episode, in seconds."] = 3600.0
    tool_timeout_s: Annotated[float, "Default time limit for one call of a tool or environment, in seconds."] = 60.0
    plugin_processes: Annotated[
        int, "Number of processes that run episodes and rewards written with async def; each has one event loop."
    ] = 1
    gateway_host: Annotated[
        str, "Address on which the gateway listens for agents; containers need one that they can reach."
    ] = "127.0.0.1"
    gateway_port: Annotated[int, "Port of the gateway; 0 takes a free one."] = 0

    def __post_init__(self) -> None:
        both = self.custom_generate_function_path is not None and self.agent_command is not None
        refuse(
            at_least(self, 1, "max_turns", "rollout_max_context_len", "max_episodes", "plugin_processes")
            + above(self, 0, "episode_timeout_s", "tool_timeout_s")
            + must(0 <= self.gateway_port < 65536, f"gateway-port must be 0 to 65535, got {self.gateway_port}")
            + must(not both, "custom-generate-function-path and agent-command: leave one of them out")
        )

    @property
    def has_episodes(self) -> bool:
        """Whether user code generates the samples."""
        return self.custom_generate_function_path is not None or self.agent_command is not None
