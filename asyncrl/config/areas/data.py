"""The training prompts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from asyncrl.config.areas.ranges import at_least, must, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The training prompts."""

    prompt_data: Annotated[Path, "JSONL file of training prompts, one object per line."]
    input_key: Annotated[str, "Key of the prompt: a string, or chat messages with --apply-chat-template."] = "input"
    label_key: Annotated[str | None, "Key of the reference answer."] = None
    metadata_key: Annotated[str | None, "Key of an object that rewards and filters receive unchanged."] = None
    apply_chat_template: Annotated[bool, "Render chat messages with the tokenizer's chat template."] = False
    rollout_shuffle: Annotated[bool, "Shuffle the prompts in each epoch."] = False
    rollout_seed: Annotated[int, "Random seed of --rollout-shuffle."] = 42
    rollout_max_prompt_len: Annotated[
        int | None,
        "Maximum prompt length in tokens. Longer prompts are skipped and counted in the log. Default: no limit.",
    ] = None

    def __post_init__(self) -> None:
        refuse(
            at_least(self, 1, "rollout_max_prompt_len")
            + at_least(self, 0, "rollout_seed")
            + must(self.input_key != "", "input-key must not be empty")
        )
