"""The description of an evaluation set."""

from dataclasses import dataclass, field
from typing import Any

__all__ = ["EvalDatasetConfig"]


@dataclass
class EvalDatasetConfig:
    """One evaluation set; None stands for the run's setting."""

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    multimodal_keys: dict[str, str] | None = None
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """The fields that decide which prompts there are."""
        return (self.name, self.path, self.input_key, self.label_key, self.tool_key, self.metadata_key)

    def inject_metadata(self, sample_metadata: Any) -> dict[str, Any]:
        """Return metadata with the set's reward type and further entries."""
        found = dict(sample_metadata) if isinstance(sample_metadata, dict) else {}
        return found | ({"rm_type": self.rm_type} if self.rm_type is not None else {}) | self.metadata_overrides
