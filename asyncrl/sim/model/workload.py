"""Prompts, answers and rewards, without any text: only their lengths matter."""

from array import array
from dataclasses import dataclass, field, replace

from asyncrl.sim.model.lengths import AnswerLengths, uniform
from asyncrl.types import Chunk, Floats, Prompt, Request, Sample, ScoredGroup

_REJECTED = "rejected at random"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The prompts and the lengths of their answers.

    One simulated token (a *unit*) stands for ``grain`` real tokens, which makes samples cheap to handle.
    """

    lengths: AnswerLengths
    prompt_tokens: int
    grain: int
    rejected: float = 0.0
    """Share of the prompts whose groups the filter rejects."""
    seed: int = 0
    prompt_units: int = field(init=False)
    """Length of a prompt, in units."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_units", self.units_of(self.prompt_tokens))

    @property
    def cut_units(self) -> int:
        """The longest possible answer, in units."""
        return self.units_of(self.lengths.cut)

    def with_seed(self, seed: int) -> "Workload":
        """The same distribution with other lengths and other prompts rejected."""
        return replace(self, seed=seed, lengths=self.lengths.with_seed(seed))

    def units_of(self, tokens: int) -> int:
        """``tokens`` in units, at least 1."""
        return max(1, round(tokens / self.grain))

    def units_left(self, request: Request) -> int:
        """Units that an answer still has to generate."""
        row, index = request.token_ids[0], int(request.request_id.rpartition(".")[2].partition("-")[0])
        written = len(request.token_ids) - self.prompt_units
        return self.units_of(self.lengths.tokens(row, index)) - written

    def keep(self, group: ScoredGroup) -> str | None:
        """A ``KeepFn`` that rejects the same prompts in every run."""
        return _REJECTED if uniform(self.seed, group.prompt.row) < self.rejected else None


class NumberedPrompts:
    """Prompts 0, 1, 2 and so on, each once."""

    def __init__(self, prompt_units: int) -> None:
        self._rest = (0,) * (prompt_units - 1)
        self._taken = 0

    async def ready(self) -> None:
        """See ``PromptSource.ready``."""

    def take(self) -> Prompt:
        """See ``PromptSource.take``.  The first token is the row."""
        row = self._taken
        self._taken += 1
        return Prompt(row=row, epoch=0, text="", token_ids=(row, *self._rest), label=None)


class NoText:
    """A tokenizer that returns nothing."""

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer.encode``."""
        return []

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """See ``Tokenizer.decode``."""
        return ""


async def no_reward(prompt: Prompt, sample: Sample) -> float:
    """A reward function that rates every answer 0."""
    return 0.0


class Chunks:
    """Chunks of any length, each made once: a million samples share them."""

    def __init__(self) -> None:
        self._tokens: dict[int, tuple[int, ...]] = {}
        self._logprobs: dict[int, Floats] = {}

    def of(self, units: int, version: int) -> Chunk:
        """A chunk of ``units`` tokens generated under ``version``."""
        if units not in self._tokens:
            self._tokens[units], self._logprobs[units] = (0,) * units, array("f", bytes(4 * units))
        return Chunk(token_ids=self._tokens[units], logprobs=self._logprobs[units], version=version)
