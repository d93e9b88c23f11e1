"""The built-in rewards, chosen per run (``--rm-type``) and per row (``rm_type`` in the metadata)."""

import functools
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.config.areas.rewards import BOXED, DEFAULT_KEYS, GRADE_WHOLE_TEXTS, REMOTE, key_problem, rm_type_problem
from asyncrl.errors import RewardFailed
from asyncrl.rewards.graders import GRADERS
from asyncrl.rewards.graders.boxed import READ_BOXES, last_boxed
from asyncrl.rewards.resources import resources
from asyncrl.rewards.values import reward_of
from asyncrl.types import Prompt, Reward, Sample

ON_LOOP: Mapping[str, int] = {"number": 20_000, "exact": 1_000_000, "random": 1_000_000, "f1": 1_000, "gpqa": 500}
"""Longest response, in characters, that a grader usually grades within 100 microseconds, so on the event loop.

Longer responses and all other graders go to the worker processes.
"""
Decode = Callable[[tuple[int, ...]], str]
"""Returns the text of token ids."""
NO_URL = "the row's rm_type is remote_rm; give --rm-url"


class BuiltIn:
    """The reward of a built-in grader or of a service."""

    has_deadlines = True

    def __init__(
        self, rm_type: str | None, *, key: str | None, url: str | None, without_specials: Decode | None = None
    ) -> None:
        """``without_specials`` gives GRADE_WHOLE_TEXTS their text; None stands for the sample's text."""
        self._rm_type = rm_type
        self._without_specials = without_specials
        self._key = key
        self._url = url

    @property
    def needs_pool(self) -> bool:
        """Whether workers should be ready before the first answer."""
        return self._rm_type is not None and self._rm_type.removeprefix(BOXED) in GRADERS.keys() - ON_LOOP.keys()

    def row_problem(self, prompt: Prompt) -> str | None:
        """Return the reason why responses to a row cannot be graded, or None."""
        try:
            name = self._name_for(prompt)
        except RewardFailed as error:
            return str(error)
        if name.removeprefix(BOXED) == REMOTE and self._url is None:
            return NO_URL
        return key_problem(name, self._key)

    async def __call__(self, prompt: Prompt, sample: Sample, /) -> Reward:
        """Return the reward.  Raises RewardFailed."""
        name = self._name_for(prompt)
        response = sample.text
        if name in GRADE_WHOLE_TEXTS and self._without_specials is not None:
            response = self._without_specials(sample.token_ids)
        if name.startswith(BOXED):
            name = name.removeprefix(BOXED)
            response = response if name in READ_BOXES else last_boxed(response) or ""
        if name == REMOTE:
            if self._url is None:
                raise RewardFailed(NO_URL)
            value = await resources().service(self._url, self).score(prompt.text, sample.text, prompt.label)
        else:
            value = await _graded(name, response, prompt)
        key = self._key if self._key is not None else DEFAULT_KEYS.get(name)
        return reward_of(value, key)

    def _name_for(self, prompt: Prompt) -> str:
        name = prompt.metadata.get("rm_type") or self._rm_type
        if name is None:
            raise RewardFailed("the row's metadata has no rm_type, and there is no --rm-type")
        stripped = name.strip() if isinstance(name, str) else str(name)
        problem = rm_type_problem(stripped)
        if problem is not None:
            raise RewardFailed(f"the row's rm_type {problem}")
        return stripped


async def _graded(name: str, response: str, prompt: Prompt) -> Any:
    if len(response) <= ON_LOOP.get(name, -1):
        return GRADERS[name](response, prompt.label, prompt.metadata)
    return await resources().pool.run(_resolver(name), response, prompt.label, dict(prompt.metadata))


@functools.cache
def _resolver(name: str) -> bytes:
    return pickle.dumps(functools.partial(GRADERS.__getitem__, name))
