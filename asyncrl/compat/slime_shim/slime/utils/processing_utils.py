"""The tokenizer of a model folder."""

from functools import partial
from typing import Any

__all__ = [
    "build_processor_kwargs",
    "encode_image_for_rollout_engine",
    "load_processor",
    "load_tokenizer",
    "process_vision_info",
]

_NO_IMAGES = "asyncrl trains on text; it has no processor of images"


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """Return transformers' tokenizer.  Its ``apply_chat_template(tokenize=True)`` returns a list, as before 5.0."""
    from transformers import AutoTokenizer  # imports torch: seconds

    tokenizer = AutoTokenizer.from_pretrained(str(name_or_path), **kwargs)
    tokenizer.apply_chat_template = partial(type(tokenizer).apply_chat_template, tokenizer, return_dict=False)
    return tokenizer


def load_processor(name_or_path: str, **kwargs: Any) -> Any:
    """Return None: models of text have no processor."""
    return None


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Raise NotImplementedError: there is no processor."""
    raise NotImplementedError(_NO_IMAGES)


def process_vision_info(prompt: Any, processor: Any) -> dict[str, Any]:
    """Raise NotImplementedError: there is no processor."""
    raise NotImplementedError(_NO_IMAGES)


def encode_image_for_rollout_engine(image: Any) -> str:
    """Return a PIL image as a PNG data URL."""
    import base64
    import io

    buffer = io.BytesIO()
    (image if image.mode == "RGB" else image.convert("RGB")).save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
