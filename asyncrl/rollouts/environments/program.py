"""Episodes of environment classes: ``reset`` gives the first observation, ``step`` answers an action.

class Guess:
    def reset(self, prompt, metadata):                 # asked for what it names
        self.number = metadata["number"]
        return None                                    # the prompt is the first observation

    def step(self, action):                            # the text of a turn, with the model's end token
        guess = int(action.removesuffix("<|im_end|>"))
        return ("higher" if guess < self.number else "lower"), float(guess == self.number), guess == self.number, {}

episode = environment_program(Guess)                   # --custom-generate-function-path guess:episode
"""

import inspect
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import name_of
from asyncrl.rollouts.native import Conversation, Episode

type Step = tuple[Any, float, bool, Mapping[str, Any]]
"""Observation, reward of the turn, whether the episode is over, and values for ``sample.metadata``."""


def environment_program(
    make: Callable[[], Any], *, chat: bool = True, turn_rewards: bool = False, **settings: Any
) -> Callable[[Episode], Awaitable[None]]:
    """Return an episode that plays one environment of ``make``, a class or a function without arguments.

    ``reset`` may name any of ``prompt``, ``messages``, ``label``, ``metadata``, ``options`` (the metadata again),
    ``index``, ``seed`` and ``is_evaluation``; the seed depends on the prompt alone, so all episodes of a group start
    alike.  It returns None for the row's prompt, or an observation in the place of it.  ``step`` takes the text of a
    turn and returns ``(observation, reward, done, info)``.  The values of gymnasium are taken as well: a pair of
    ``reset``, and five values of ``step`` with ``truncated`` before ``info``.

    An observation is text, a chat message or a list of them.  Text becomes a user message; with ``chat=False``, for
    checkpoints without a chat template, it is appended as it is.  ``reset``, ``step`` and ``close``, which may be left
    out, are ``async def``, or run in a thread; the limit of each is ``--tool-timeout-s``.

    The reward of the episode is the sum of the turns' rewards, or the entry ``reward`` of the last ``info`` that has
    one.  With ``turn_rewards`` each turn also keeps its reward.  Other entries of ``info`` become metadata.
    ``settings`` are those of ``ep.generate``.
    """

    async def episode(ep: Episode) -> None:
        environment = await _uncounted(ep, make)
        try:
            await _play(ep, environment, _Shape(chat=chat, turn_rewards=turn_rewards), settings)
        finally:
            if hasattr(environment, "close"):
                await _uncounted(ep, environment.close)

    episode.__name__ = name_of(make)
    return episode


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    chat: bool
    turn_rewards: bool

    def seen(self, observation: Any) -> Any:
        """Return an observation as conversations take it."""
        return [{"role": "user", "content": observation}] if self.chat and isinstance(observation, str) else observation


async def _play(ep: Episode, environment: Any, shape: _Shape, settings: Mapping[str, Any]) -> None:
    agent = _start(ep, await _uncounted(ep, environment.reset, **_asked_for(environment.reset, ep)), shape)
    total, final = 0.0, None
    agent.reward = 0.0  # also if a limit ends the episode before the first step
    for turns_left in range(ep.max_turns - 1, -1, -1):
        turn = await agent.generate(**settings)
        observation, reward, done, info = _step_of(environment, await ep.call(environment.step, turn.text))
        ep.metadata.update((name, value) for name, value in info.items() if name != "reward")
        turn.reward = reward if shape.turn_rewards else None
        total, final = total + reward, info.get("reward", final)
        agent.reward = total if final is None else final
        if done or turns_left == 0:
            return
        agent.observe(shape.seen(observation))


def _start(ep: Episode, first: Any, shape: _Shape) -> Conversation:
    """Return the conversation that begins with the observation of ``reset``."""
    if isinstance(first, tuple) and len(first) == 2 and isinstance(first[1], Mapping):
        ep.metadata.update(first[1])
        first = first[0]
    if first is None:
        return ep
    return ep.conversation([first] if isinstance(first, Mapping) else shape.seen(first))


def _step_of(environment: Any, result: Any) -> Step:
    """Return the four values of a step.  Raises TypeError for any other result."""
    name = type(environment).__name__
    match result:
        case (observation, reward, done, info) if isinstance(info, Mapping):
            return observation, _number(name, reward), bool(done), info
        case (observation, reward, terminated, truncated, info) if isinstance(info, Mapping):
            return observation, _number(name, reward), bool(terminated or truncated), info
    raise TypeError(f"{name}.step must return (observation, reward, done, info), got {result!r:.100}")


def _number(name: str, reward: Any) -> float:
    try:
        return float(reward)
    except (TypeError, ValueError):
        raise TypeError(f"{name}.step must return a number as the reward, got {reward!r:.100}") from None


def _asked_for(reset: Callable[..., Any], ep: Episode) -> dict[str, Any]:
    """Return the values that ``reset`` names among its parameters."""
    values = {
        "prompt": ep.prompt,
        "messages": ep.messages,
        "label": ep.label,
        "metadata": ep.metadata,
        "options": ep.metadata,
        "index": ep.index,
        "seed": zlib.crc32(ep.prompt.encode()) >> 1,
        "is_evaluation": ep.is_evaluation,
    }
    parameters = inspect.signature(reset).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return values
    return {each.name: values[each.name] for each in parameters if each.name in values}


async def _uncounted(ep: Episode, function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a part of the environment that is no action of the model, so it does not count as a tool call."""
    try:
        return await ep.call(function, **arguments)
    finally:
        ep.num_tool_calls -= 1
