"""The page of the Python API, which mkdocstrings fills from the sources without importing them."""

from collections.abc import Iterable, Mapping

SECTIONS: Mapping[str, Iterable[str]] = {
    "The data of a run": (
        *(f"asyncrl.types.{name}" for name in ("Prompt", "NewPrompt", "Sample", "Span", "Turn", "FinishReason")),
        *(f"asyncrl.types.{name}" for name in ("Reward", "ScoredSample", "ScoredGroup", "Picked", "Batch")),
        *(f"asyncrl.types.{name}" for name in ("EvalReport", "EvalSetReport", "Estimate")),
    ),
    "Rewards, filters and data sources": (
        *(f"asyncrl.protocols.{name}" for name in ("RewardFn", "GroupRewardFn", "KeepFn", "PickFn")),
        *(f"asyncrl.protocols.{name}" for name in ("UserSource", "ResumableSource")),
        *(f"asyncrl.filters.{name}" for name in ("RewardBounds", "LengthBounds", "TruncatedShare", "Fresh")),
        *(f"asyncrl.filters.{name}" for name in ("all_of", "check_reward_nonzero_std")),
    ),
    "Hooks of a step, and log functions": (
        *(f"asyncrl.protocols.{name}" for name in ("SampleFilterFn", "AllSamplesFn", "RewardPostProcessFn")),
        *(f"asyncrl.protocols.{name}" for name in ("ConvertFn", "RolloutLogFn", "EvalLogFn")),
    ),
    "Evaluations": ("asyncrl.protocols.EvalFn", "asyncrl.protocols.HeldOutPass"),
    "Advantages, losses and corrections": (
        *(f"asyncrl.algorithms.custom_functions.{name}" for name in ("StepSamples", "AdvantageFn", "LossFn", "TisFn")),
        *(f"asyncrl.algorithms.advantages.{name}" for name in ("group_normalised", "group_centred")),
    ),
    "Episodes": (
        *(f"asyncrl.rollouts.native.{name}" for name in ("Episode", "Conversation", "ModelTurn", "EpisodeSettings")),
        *(f"asyncrl.rollouts.testing.{name}" for name in ("play", "Played")),
        *(f"asyncrl.episodes.{name}" for name in ("Trajectory", "EpisodeOutcome", "EpisodeEnd")),
    ),
    "Tools and environments": (
        *(f"asyncrl.rollouts.tools.loop.{name}" for name in ("run_tools", "call_tools")),
        *(f"asyncrl.rollouts.tools.sandbox.{name}" for name in ("Sandbox", "SandboxResult")),
        *(f"asyncrl.rollouts.tools.search.{name}" for name in ("SearchIndex", "Document", "Hit", "passages")),
        "asyncrl.rollouts.environments.program.environment_program",
        *(f"asyncrl.rollouts.environments.verifiers.{name}" for name in ("environment", "prompts")),
    ),
    "Errors": (
        *(f"asyncrl.errors.{name}" for name in ("AsyncRLError", "ConfigError", "PluginError", "RewardFailed")),
        *(f"asyncrl.errors.{name}" for name in ("RewardUnavailable", "EpisodeEnded", "ToolFailed", "ToolTimeout")),
    ),
}
"""The objects that user functions meet, by subject."""


def api_page() -> str:
    """Return the page with one directive of mkdocstrings for each object."""
    parts = [_HEAD]
    for title, names in SECTIONS.items():
        parts += [f"## {title}", "", *(f"::: {name}\n" for name in names)]
    return "\n".join(parts)


_HEAD = """# Python API

This page is for people who write [user functions](../plugins.md), [rewards](../rewards.md) or
[episodes](../guides/multi_turn.md). It lists the classes and functions that they meet. Text and signatures come from
the code. Everything else in the package may change between versions without a note in the changelog.
"""
