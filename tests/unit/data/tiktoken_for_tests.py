"""A small tiktoken tokenizer in a folder like Kimi K2's, with ranks that the tokenizers library learned."""

import base64
import json
from pathlib import Path

import tokenizers  # type: ignore[import-untyped]

from asyncrl.data.byte_level import byte_of_character
from asyncrl.data.tiktoken_words import ALTERNATIVES, PATTERN

TEXTS = ["The cat's sat, don't WORRY: äöü 日本語 北京市 Pascal ünïcode 1234567 x=1\n\n\tnaïve  emoji 🎉🎊 SHE'LL"]
SPECIAL = {0: ("[BOS]", True), 1: ("[EOS]", True), 2: ("<|im_end|>", True), 3: ("<|im_user|>", True)}
"""Added tokens by their distance from the last rank: content, and whether they are special."""
PLAIN = (10, "<|tool_call_begin|>")
"""An added token that is not special."""
TEMPLATE = (
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)


def ranks() -> dict[bytes, int]:
    """Ranks of single bytes and of about 300 merges."""
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=560, initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator(TEXTS * 5, trainer)
    byte_of = byte_of_character()
    return {bytes(byte_of[character] for character in token): rank for token, rank in words.get_vocab().items()}


def tiktoken_folder(folder: Path, *, code: bool = True) -> Path:
    """Write the ranks, the settings and, unless ``code`` is off, code that must not be executed."""
    found = ranks()
    lines = [b"%b %d" % (base64.b64encode(word), rank) for word, rank in sorted(found.items(), key=lambda it: it[1])]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    added = {len(found) + place: {"content": text, "special": special} for place, (text, special) in SPECIAL.items()}
    added[len(found) + PLAIN[0]] = {"content": PLAIN[1], "special": False}
    settings = {"added_tokens_decoder": added, "tokenizer_class": "TikTokenTokenizer", "eos_token": "[EOS]"}
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if code:
        parts = ",\n".join(f'r"""{part}"""' for part in ALTERNATIVES)
        (folder / "tokenization_kimi.py").write_text(f"pat_str = '|'.join([{parts}])\nraise SystemExit('executed')\n")
    return folder
