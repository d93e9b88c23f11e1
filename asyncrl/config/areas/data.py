"""The training prompts."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from asyncrl.config.areas.ranges import at_least, must, refuse

_SLICED = re.compile(r"(?P<path>.+)@\[(?P<start>(?:-?[0-9]+)?):(?P<stop>(?:-?[0-9]+)?)\]", re.DOTALL)
DEFAULT_WORKERS = 2
"""The default of ``--num-data-workers``: twice the demand of a small model's run, on a machine of two cores."""
_SET_BY_ASYNCRL = frozenset({"messages", "tools", "documents", "tokenize", "add_generation_prompt"})
"""Variables of a chat template that are not the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The training prompts."""

    prompt_data: Annotated[
        tuple[Path, ...], "JSONL or Parquet files of training prompts. FILE@[a:b] has the rows a to b of FILE alone."
    ]
    input_key: Annotated[str, "Key of the prompt: a string or a list of chat messages."] = "input"
    label_key: Annotated[str | None, "Key of the reference answer, which may be any JSON value."] = None
    metadata_key: Annotated[
        str | None, "Key of an object, or of its JSON text, for rewards and filters. Rows may lack it."
    ] = "metadata"
    tool_key: Annotated[
        str | None, "Key of a list of tool schemas, or of its JSON text, for the chat template. Rows may lack it."
    ] = "tools"
    apply_chat_template: Annotated[bool, "Render prompts with the tokenizer's chat template."] = False
    apply_chat_template_kwargs: Annotated[
        str | None, 'JSON object of further variables for the chat template, such as {"enable_thinking": false}.'
    ] = None
    rollout_shuffle: Annotated[bool, "Shuffle the prompts in each epoch."] = False
    rollout_seed: Annotated[int, "Random seed of --rollout-shuffle."] = 42
    rollout_max_prompt_len: Annotated[
        int | None,
        "Maximum prompt length in tokens. Longer prompts are skipped and counted in the log. Default: no limit.",
    ] = None
    streaming_data: Annotated[
        bool, "Read and tokenise the files during the run instead of before it, in constant memory."
    ] = False
    num_data_workers: Annotated[
        int | None, "Number of processes that read and tokenise with --streaming-data. Default: 2."
    ] = None

    def __post_init__(self) -> None:
        refuse(
            at_least(self, 1, "rollout_max_prompt_len", "num_data_workers")
            + at_least(self, 0, "rollout_seed")
            + must(self.input_key != "", "input-key must not be empty")
            + must(len(self.prompt_data) > 0, "prompt-data names no file; give JSONL or Parquet files")
            + _template_problems(self.apply_chat_template_kwargs)
        )

    @property
    def num_workers(self) -> int:
        """The number of data workers."""
        return DEFAULT_WORKERS if self.num_data_workers is None else self.num_data_workers

    @property
    def template_variables(self) -> dict[str, Any]:
        """The object in ``apply_chat_template_kwargs``."""
        text = self.apply_chat_template_kwargs
        return {} if text is None else dict(json.loads(text))


def sliced(path: Path) -> tuple[Path, slice]:
    """Split ``FILE@[start:stop]`` into the file and a slice of its rows; a bare path has all rows."""
    found = _SLICED.fullmatch(str(path))
    if found is None:
        return path, slice(None)
    start, stop = (int(found[name]) if found[name] else None for name in ("start", "stop"))
    return Path(found["path"]), slice(start, stop)


def _template_problems(text: str | None) -> list[str]:
    if text is None:
        return []
    try:
        found = json.loads(text)
    except ValueError as error:
        return [f"apply-chat-template-kwargs must be a JSON object, got {text!r}: {error}"]
    if not isinstance(found, dict):
        return [f"apply-chat-template-kwargs must be a JSON object, got {text!r}"]
    taken = ", ".join(sorted(_SET_BY_ASYNCRL & found.keys()))
    return must(not taken, f"apply-chat-template-kwargs must not have {taken}: the run sets them")
