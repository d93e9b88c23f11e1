"""The workload of ``benchmarks.sync_vs_async``: a model that never ends an answer, prompts, lengths and rewards.

Everything is drawn from the seed and the place of a sample, so that all arrangements get the same.
"""

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers  # type: ignore[import-untyped]

from asyncrl.protocols import RolloutEngine
from asyncrl.sim.model.lengths import Drawn, LogNormal, uniform
from asyncrl.types import Chunk, FinishReason, Prompt, Request, Sample
from benchmarks.common.shapes import SHAPES, write_random

P95_RATIO = 8.0
"""95th percentile of the lengths, divided by their median."""
CUT_RATIO = 16
"""Longest length, divided by the median."""
_LETTERS = 6
"""Most letters of a made-up word; with the blank in front, English has 4 to 5 characters per token."""
_REWARD = 1
"""A key that separates the draws of rewards from those of lengths, which use only a row and an index."""


def write_checkpoint(folder: Path, name: str, device: str) -> None:
    """Write random weights of the shape ``name``, a tokenizer for its vocabulary, and no token that ends an answer."""
    write_random(folder, name, device=device)
    _write_endless(folder, json.loads((folder / "config.json").read_text()))


def write_shape(folder: Path, config: Path, device: str) -> None:
    """Write the same for any config.json, with transformers, which restores GLM's end tokens; these are removed."""
    import torch
    import transformers

    of_family = transformers.AutoConfig.from_pretrained(config, pad_token_id=None)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        transformers.AutoModelForCausalLM.from_config(of_family, dtype=dtype).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    _write_endless(folder, json.loads(config.read_text()))


def write_weightless(folder: Path, name: str) -> None:
    """Write a config of the shape ``name`` and a tokenizer, for servers that make up their weights."""
    _write_endless(folder, SHAPES[name])


def _write_endless(folder: Path, config: dict[str, Any]) -> None:
    """Write a config without a last token, and a tokenizer, whose ``tokenizer_config.json`` is written last."""
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    made_up_words(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    about = {
        "backend": "tokenizers",
        "tokenizer_class": "TokenizersBackend",
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def made_up_words(size: int) -> tokenizers.Tokenizer:
    """A byte-level vocabulary of ``size`` tokens, as Qwen has one: all bytes, and words of random letters."""
    draw = random.Random(size)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: place for place, byte in enumerate(alphabet)}
    while len(vocabulary) < size:
        letters = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, _LETTERS)))
        vocabulary.setdefault(f"\u0120{letters}", len(vocabulary))
    words = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    words.decoder = tokenizers.decoders.ByteLevel()
    return words


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedWorkload:
    """Prompts of ``prompt_tokens`` random tokens, answers of log-normal length, random rewards."""

    vocabulary: int
    prompt_tokens: int
    median: int
    longest: int
    """Longest answer, in tokens."""
    seed: int

    def __post_init__(self) -> None:
        if self.prompt_tokens < 2:
            raise ValueError(f"prompt_tokens must be at least 2, which encode the row, got {self.prompt_tokens}")

    def length(self, row: int, index: int) -> int:
        """Tokens of answer ``index`` to the prompt of ``row``."""
        shape = LogNormal(median=self.median, p95_ratio=P95_RATIO)
        return Drawn(shape=shape, cut=self.longest, seed=self.seed).tokens(row, index)

    def prompt(self, row: int) -> Prompt:
        """The prompt of a row.  Its first two tokens are the row in base ``vocabulary``: engines see only tokens."""
        draw = random.Random(f"{self.seed}:{row}")
        rest = draw.choices(range(self.vocabulary), k=self.prompt_tokens - 2)
        return Prompt(
            row=row, epoch=0, text="", token_ids=(*divmod(row, self.vocabulary), *rest), label=None, metadata={}
        )

    def tokens_left(self, request: Request) -> int:
        """Tokens that an answer still has to generate."""
        first, second, *_ = request.token_ids
        index = int(request.request_id.rpartition(".")[2].partition("-")[0])
        written = len(request.token_ids) - self.prompt_tokens
        return self.length(first * self.vocabulary + second, index) - written

    async def reward(self, prompt: Prompt, sample: Sample) -> float:
        """A random reward between 0 and 1: no group has equal rewards, whatever its answers are."""
        return uniform(self.seed, prompt.row, sample.index, _REWARD)


class Prompts:
    """A ``PromptSource`` of rows from ``first`` on."""

    def __init__(self, workload: ForcedWorkload, first: int) -> None:
        self._workload = workload
        self._next = first

    async def ready(self) -> None:
        """See ``PromptSource.ready``."""

    def take(self) -> Prompt:
        """See ``PromptSource.take``."""
        self._next += 1
        return self._workload.prompt(self._next - 1)


class ForcedLengths:
    """A ``RolloutEngine`` over another, whose answers have the lengths of the workload."""

    def __init__(self, engine: RolloutEngine, workload: ForcedWorkload) -> None:
        self._engine = engine
        self._workload = workload

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        """See ``RolloutEngine.generate``."""
        left = self._workload.tokens_left(request)
        if left <= 0:  # all tokens are there, only the end of the response was lost
            return FinishReason.LENGTH
        return await self._engine.generate(
            replace(request, sampling=replace(request.sampling, max_new_tokens=left)), on_chunk
        )

    async def interrupt(self) -> None:
        """See ``RolloutEngine.interrupt``."""
        await self._engine.interrupt()

    async def score(self, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        """See ``RolloutEngine.score``."""
        return await self._engine.score(token_ids, start)


def keep_all(group: object) -> str | None:
    """Keep every group; see ``KeepFn``."""
    return None
