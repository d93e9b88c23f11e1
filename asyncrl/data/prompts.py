"""Prompts from a file, tokenised once, and an endless seeded iteration over them."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from asyncrl.config.areas import DataConfig
from asyncrl.data.rows import Row, read_rows
from asyncrl.data.tokenizer import TextTokenizer
from asyncrl.errors import DataError
from asyncrl.types import Prompt

logger = logging.getLogger(__name__)


class EndlessPrompts:
    """Every prompt once per epoch: in file order, or in a permutation per epoch if ``shuffle_seed`` is given.

    ``position`` counts the prompts taken.  After ``seek(position)``, another source with the same prompts and seed
    returns the same prompts.
    """

    def __init__(self, prompts: Sequence[Prompt], shuffle_seed: int | None) -> None:
        if not prompts:
            raise ValueError("prompts must not be empty")
        self._prompts = tuple(prompts)
        self._seed = shuffle_seed
        self._position = 0
        self._epoch = -1
        self._order: Sequence[int] = ()
        self._by_row: dict[int, Prompt] | None = None

    def __len__(self) -> int:
        """Return the number of prompts per epoch."""
        return len(self._prompts)

    @property
    def position(self) -> int:
        """Prompts taken since the first epoch began."""
        return self._position

    def seek(self, position: int) -> None:
        """Continue with the prompt at ``position``.  Raises ValueError if ``position`` is negative."""
        if position < 0:
            raise ValueError(f"position must be at least 0, got {position}")
        self._position = position

    @property
    def fingerprint(self) -> str:
        """A digest of the prompts, their order and the seed; positions are comparable only if it is equal."""
        digest = hashlib.blake2b(f"{len(self)} {self._seed}".encode(), digest_size=16)
        for prompt in self._prompts:
            digest.update(np.array([prompt.row, *prompt.token_ids], dtype=np.int64).tobytes())
        return digest.hexdigest()

    def at(self, epoch: int, row: int) -> Prompt:
        """Return the prompt of a row of the file.  Raises KeyError."""
        if self._by_row is None:
            self._by_row = {prompt.row: prompt for prompt in self._prompts}
        return replace(self._by_row[row], epoch=epoch)

    async def ready(self) -> None:
        """See ``PromptSource.ready``."""

    def take(self) -> Prompt:
        """Return the next prompt.  Never waits."""
        epoch, place = divmod(self._position, len(self._prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._permutation(epoch)
        self._position += 1
        return replace(self._prompts[self._order[place]], epoch=epoch)

    def _permutation(self, epoch: int) -> Sequence[int]:
        if self._seed is None:
            return range(len(self._prompts))
        order: list[int] = np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts)).tolist()
        return order


def load_prompts(data: DataConfig, tokenizer: TextTokenizer) -> EndlessPrompts:
    """Read the training prompts.  Raises DataError, also if none is within ``--rollout-max-prompt-len``."""
    prompts = _read(data.prompt_data, data, tokenizer)
    kept = _short_enough(prompts, data.rollout_max_prompt_len)
    if not kept:
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        raise DataError(
            f"{data.prompt_data}: no prompt has at most rollout-max-prompt-len {data.rollout_max_prompt_len} tokens; "
            f"the shortest has {shortest}"
        )
    logger.info("%s: %d prompts, %d longer ones left out", data.prompt_data, len(kept), len(prompts) - len(kept))
    return EndlessPrompts(kept, data.rollout_seed if data.rollout_shuffle else None)


def load_held_out(path: Path, data: DataConfig, tokenizer: TextTokenizer) -> tuple[Prompt, ...]:
    """Read all prompts of an evaluation file, in file order and without a length limit.

    Rows use the same keys as the training prompts.  Raises DataError.
    """
    return tuple(_read(path, data, tokenizer))


def _read(path: Path, data: DataConfig, tokenizer: TextTokenizer) -> list[Prompt]:
    rows = read_rows(path, data)
    texts = [_text(path, row, tokenizer) for row in rows]
    prompts = []
    for place, (row, text, token_ids) in enumerate(zip(rows, texts, tokenizer.encode_all(texts), strict=True)):
        if not token_ids:
            raise DataError(f'{path}:{row.line}: key "{data.input_key}" has no tokens')
        prompts.append(
            Prompt(row=place, epoch=0, text=text, token_ids=tuple(token_ids), label=row.label, metadata=row.metadata)
        )
    return prompts


def _text(path: Path, row: Row, tokenizer: TextTokenizer) -> str:
    if isinstance(row.prompt, str):
        return row.prompt
    try:
        return tokenizer.render(row.prompt)
    except DataError as error:
        raise DataError(f"{path}:{row.line}: {error}") from error


def _short_enough(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    return prompts if limit is None else [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
