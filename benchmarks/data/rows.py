"""Rows of made-up text."""

import random
from pathlib import Path

import orjson
import tokenizers  # type: ignore[import-untyped]

NUM_TEXTS = 500
"""Different texts; each row adds its number."""


def write_rows(path: Path, num_bytes: int) -> int:
    """Write rows of about 1 kB until the file has ``num_bytes``.  Return their number."""
    ends = [orjson.dumps({"input": text, "label": str(number)})[1:] for number, text in enumerate(_texts())]
    num_rows = 0
    with path.open("wb") as handle:
        while handle.tell() < num_bytes:
            numbered = enumerate(ends, start=num_rows)
            handle.write(b"".join(b'{"metadata": {"number": %d}, %b\n' % (number, end) for number, end in numbered))
            num_rows += len(ends)
    return num_rows


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE of 2,000 tokens, trained on the texts."""
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    words.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator(_texts(), trainer)
    words.save(str(folder / "tokenizer.json"))


def _texts() -> list[str]:
    draws = random.Random(0)
    words = ["".join(draws.choices("abcdefghijklmnopqrstuvwxyz", k=draws.randint(2, 9))) for _ in range(2000)]
    return [" ".join(draws.choices(words, k=150)) for _ in range(NUM_TEXTS)]
