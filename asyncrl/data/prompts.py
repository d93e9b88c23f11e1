"""Prompts from files, tokenised once, and an endless seeded iteration over them."""

import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from asyncrl.config.areas import DataConfig
from asyncrl.data.files import open_files
from asyncrl.data.making import Broken, Made, PromptMaker, TooLong
from asyncrl.data.raw_rows import PromptFile, RawRow
from asyncrl.data.rows import HELD_OUT_KEYS, TRAINING_KEYS
from asyncrl.data.tokenizer import TextTokenizer
from asyncrl.errors import DataError
from asyncrl.types import Prompt

logger = logging.getLogger(__name__)

MESSAGES_NOTE = 'key "%s" has lists of messages: the chat template makes their tokens, functions receive the list'
"""The log line for a run that has chat messages without ``--apply-chat-template``."""
FLAG = "rollout-max-prompt-len"
"""The limit of a prompt's tokens."""
_AT_ONCE = 1000
"""Rows that are tokenised together, on all cores."""


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
    def rows(self) -> Sequence[Prompt]:
        """The prompts in the order of the files."""
        return self._prompts

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


def load_prompts(
    data: DataConfig, tokenizer: TextTokenizer, *, takes_numbers: bool = False, most_tokens: int | None = None
) -> EndlessPrompts:
    """Read the training prompts; ``takes_numbers``: see ``row_of``.

    ``most_tokens`` is the limit without ``--rollout-max-prompt-len``.  Raises DataError, also if no prompt is within
    the limit.
    """
    limit = data.rollout_max_prompt_len
    data = data if limit is not None else replace(data, rollout_max_prompt_len=most_tokens)
    files = ", ".join(map(str, data.prompt_data))
    kept, lengths = [], []
    for row, made in enumerate(_made(data.prompt_data, data, tokenizer, takes_numbers=takes_numbers)):
        if isinstance(made, TooLong):
            lengths.append(made.num_tokens)
        else:
            kept.append(made.prompt(row, epoch=0))
    if not kept:
        name = f"{most_tokens} tokens, for which there is room" if limit is None else f"{FLAG} {limit} tokens"
        raise DataError(f"{files}: no prompt has at most {name}; the shortest has {min(lengths)}")
    if lengths and limit is None:
        logger.warning(
            "%s: %d prompts of more than %d tokens do not fit with a response", files, len(lengths), most_tokens
        )
    logger.info("%s: %d prompts, %d longer ones left out", files, len(kept), len(lengths))
    _note_messages(kept, data)
    if data.num_data_workers is not None:
        logger.info("num-data-workers has no effect without streaming-data: all cores tokenise before the run")
    return EndlessPrompts(kept, data.rollout_seed if data.rollout_shuffle else None)


def load_held_out(
    path: Path,
    data: DataConfig,
    tokenizer: TextTokenizer,
    *,
    takes_numbers: bool = False,
    key_settings: str = HELD_OUT_KEYS,
) -> tuple[Prompt, ...]:
    """Read all prompts of an evaluation file, in file order and without a length limit.

    ``path`` may have a slice.  Rows have the keys in ``data``; ``takes_numbers`` and ``key_settings``: see
    ``row_of``.  Raises DataError.
    """
    made = _made([path], data, tokenizer, is_limited=False, takes_numbers=takes_numbers, key_settings=key_settings)
    return tuple(each.prompt(row, epoch=0) for row, each in enumerate(made) if isinstance(each, Made))


def _note_messages(prompts: Iterable[Prompt], data: DataConfig) -> None:
    """Log one line if a prompt keeps its messages."""
    if any(prompt.messages is not None for prompt in prompts):
        logger.info(MESSAGES_NOTE, data.input_key)


def _made(
    paths: Iterable[Path],
    data: DataConfig,
    tokenizer: TextTokenizer,
    *,
    is_limited: bool = True,
    takes_numbers: bool = False,
    key_settings: str = TRAINING_KEYS,
) -> Iterator[Made | TooLong]:
    """Yield the outcome of every row of all files.  Raises DataError with file and row at the first broken row."""
    maker = PromptMaker(data, tokenizer, takes_numbers=takes_numbers, key_settings=key_settings)
    for file in open_files(paths, data):
        num_rows = 0
        for rows in itertools.batched(_read(file), _AT_ONCE):
            num_rows += len(rows)
            for made in maker.made(rows, is_limited=is_limited):
                if isinstance(made, Broken):
                    raise DataError(f"{file.where(made.place, made.line)}: {made.fault}")
                yield made
        if not num_rows:
            raise DataError(f"{file.path}: the file has no rows")


def _read(file: PromptFile) -> Iterator[RawRow]:
    try:
        yield from file.rows()
    except OSError as error:
        raise DataError(f"{file.path}: {error.strerror or error}") from error
