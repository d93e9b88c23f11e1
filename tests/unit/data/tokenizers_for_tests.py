"""Tokenizer folders of a few words, written with the real library."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-untyped]

from asyncrl.data import TextTokenizer, load_tokenizer

WORDS = ["<end>", "one", "two", "three", "user", "assistant", ":", "<unknown>"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}\n"
    "{{ m.role }} : {{ m.content }} {{ eos_token }} {% endfor %}{% if add_generation_prompt %}assistant :{% endif %}"
)


def tokenizer_folder(folder: Path, template: str | None = None) -> Path:
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<end>"])
    words.enable_truncation(2)
    words.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {"eos_token": {"content": "<end>"}, "pad_token": None}
    settings |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tokenizer(folder: Path, template: str | None = None) -> TextTokenizer:
    return load_tokenizer(tokenizer_folder(folder, template))
