"""The interface for users who write an episode: ``async def episode(ep: Episode) -> None``.

    ep.generate ──▶ turn ──▶ your code ──▶ ep.observe ──▶ ep.generate ──▶ ...        ep.reward

Tokens are kept as they are: what the model wrote is never tokenised again.
"""

import asyncio
import copy
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import count
from operator import index
from typing import Any

from asyncrl.episodes import EpisodeEnd
from asyncrl.errors import EngineError, EpisodeEnded, SampleFailed, ToolFailed, ToolTimeout, name_of
from asyncrl.rewards.values import number_of, reward_of
from asyncrl.rollouts.chat import ChatTokenizer, continuation_ids, conversation_ids
from asyncrl.rollouts.further_settings import FURTHER_SETTINGS
from asyncrl.rollouts.interfaces import EpisodeCall
from asyncrl.rollouts.record import FORK
from asyncrl.rollouts.session import Verdict
from asyncrl.types import Floats, GroupId, JsonValue, SamplingParams

type Message = Mapping[str, Any]
"""A chat message: role, content and any other keys that the chat template uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """The settings of a run that an episode sees."""

    tokenizer: ChatTokenizer
    tool_timeout_s: float = 60.0
    max_turns: int | None = None
    reward_keys: Mapping[str | None, str | None] = field(default_factory=dict)
    """The entry of dict rewards (``--reward-key``) by evaluation set; None stands for training."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template (``--apply-chat-template-kwargs``)."""


@dataclass(slots=True, eq=False)
class ModelTurn:
    """One answer of the model.  ``reward`` and ``is_trained`` may be set."""

    text: str
    """With special tokens, such as the model's end token, unless the run skips them."""
    token_ids: tuple[int, ...]
    logprobs: Floats
    finish: str
    """``"stop"``, or ``"length"`` if a limit cut the answer."""
    call: int
    """Number of the answer within the episode, from 0."""
    reward: float | None = None
    """A reward of this turn alone, in addition to the episode's."""
    is_trained: bool = True
    """Whether the turn's tokens are in the loss."""


@dataclass(slots=True, eq=False)
class _State:
    """The parts of an episode that all its conversations share."""

    call: EpisodeCall
    settings: EpisodeSettings
    tools: tuple[Any, ...]
    turns: list[ModelTurn] = field(default_factory=list)
    rewards: dict[int, Any] = field(default_factory=dict)
    """Reward by conversation, as it was set."""
    numbers: "count[int]" = field(default_factory=lambda: count(1))

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """Variables of the chat template in every turn."""
        return {**self.settings.template_variables, **self.call.start.prompt.template_variables}


class Conversation:
    """The tokens that one agent of an episode has seen and written, in order."""

    def __init__(self, state: _State, number: int, token_ids: Sequence[int], reason: str | None = None) -> None:
        self._state = state
        self._number = number
        self._tokens = list(token_ids)
        self._reason = reason
        self._messages: list[Message] = []
        """Observed messages, rendered together when the model continues."""
        self._is_at_start_of_turn = True
        """Whether the tokens end where the model's turn starts: after the prompt, or after rendered messages."""

    @property
    def reward(self) -> Any:
        """A number, or a dict with the entry ``--reward-key``; None: the run's reward function is asked."""
        return self._state.rewards.get(self._number)

    @reward.setter
    def reward(self, value: Any) -> None:
        self._state.rewards[self._number] = value

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far: prompt, turns and observations, up to the place where the model continues."""
        if not self._messages:
            return tuple(self._tokens)
        settings, tools = self._state.settings, self._state.tools or None
        variables = self._state.template_variables
        return (*self._tokens, *continuation_ids(settings.tokenizer, self._tokens, self._messages, tools, variables))

    async def generate(
        self,
        *,
        stop: str | Sequence[str] = (),
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        json_schema: str | Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> ModelTurn:
        """Let the model continue.  Several conversations of an episode may generate at once.

        ``stop`` adds stop strings to the run's; ``max_new_tokens`` may only lower the run's limit; ``settings`` are
        further sampling parameters by SGLang's names, and any other name raises TypeError.  Raises EpisodeEnded if the
        episode has no turns or no room left: a function that lets it pass ends there, and its turns are trained.
        """
        usual = self._state.call.start.sampling
        changes: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if stops:
            changes["stop"] = (*usual.stop, *(each for each in stops if each not in usual.stop))
        if max_new_tokens is not None:
            changes["max_new_tokens"] = min(max_new_tokens, usual.max_new_tokens)
        if json_schema is not None:
            settings["json_schema"] = json_schema if isinstance(json_schema, str) else json.dumps(json_schema)
        return await self._generated(_with(usual, changes, settings))

    async def _generated(self, sampling: SamplingParams) -> ModelTurn:
        state, before = self._state, self.token_ids
        num_tokens, num_messages = len(self._tokens), len(self._messages)
        found = await state.call.generate(before, sampling, conversation=self._number, reason=self._reason)
        if (num_tokens, num_messages) != (len(self._tokens), len(self._messages)):
            raise RuntimeError("the conversation changed while the model continued it; fork it to continue it twice")
        self._tokens, self._messages = [*before, *found.token_ids], []
        self._is_at_start_of_turn = not found.token_ids
        turn = ModelTurn(
            text=found.text,
            token_ids=found.token_ids,
            logprobs=found.logprobs,
            finish=found.finish.value,
            call=found.call,
        )
        state.turns.append(turn)
        return turn

    def observe(self, seen: str | Message | Sequence[int] | Sequence[Message]) -> None:
        """Append what the model did not write: text as it is, token ids, or chat messages.

        Messages end the model's turn and start the next one, as the chat template does.  Raises ValueError before the
        first turn; the next ``generate`` raises DataError if the template refuses them.  Anything else, such as bytes,
        raises TypeError.
        """
        if isinstance(seen, str):
            self._append(self._state.settings.tokenizer.encode(seen))
            return
        items = _items([seen] if isinstance(seen, Mapping) else seen, "observe takes text, token ids or chat messages")
        if any(isinstance(each, Mapping) for each in items):
            if self._is_at_start_of_turn and not self._messages:
                raise ValueError("chat messages must follow a turn; start with ep.conversation(messages) instead")
            self._messages += _messages(items, "observe")
        else:
            self._append(_token_ids(items))

    def fork(self) -> "Conversation":
        """Return another continuation of the same tokens; it shares the reward of this conversation."""
        fork = Conversation(self._state, self._number, self._tokens, FORK)
        fork._messages = list(self._messages)
        fork._is_at_start_of_turn = self._is_at_start_of_turn
        return fork

    def _append(self, token_ids: Sequence[int]) -> None:
        if token_ids:
            self._tokens, self._messages = [*self.token_ids, *token_ids], []
            self._is_at_start_of_turn = False


class Episode(Conversation):
    """One episode: its task, its first conversation and its limits."""

    def __init__(self, call: EpisodeCall, settings: EpisodeSettings) -> None:
        prompt = call.start.prompt
        tools = prompt.metadata.get("tools")
        super().__init__(
            _State(call=call, settings=settings, tools=tuple(tools) if isinstance(tools, list | tuple) else ()),
            0,
            prompt.token_ids,
        )
        self.metadata: dict[str, Any] = copy.deepcopy(dict(prompt.metadata))
        """The row's metadata.  Changes reach ``sample.metadata``: JSON values for rewards, filters and logs."""
        self.num_tool_calls = 0
        self.num_tool_errors = 0

    @property
    def prompt(self) -> str:
        """The text of the prompt."""
        return self._state.call.start.prompt.text

    @property
    def messages(self) -> tuple[Message, ...] | None:
        """The chat messages of the row, if it has any and the run has no ``--apply-chat-template``."""
        return self._state.call.start.prompt.messages

    @property
    def label(self) -> JsonValue:
        """The reference answer; None without one."""
        return self._state.call.start.prompt.label

    @property
    def index(self) -> int:
        """Position in the group, from 0."""
        return self._state.call.start.index

    @property
    def group_id(self) -> GroupId | None:
        """Group of the episode; None in an evaluation."""
        return self._state.call.start.group_id

    @property
    def is_evaluation(self) -> bool:
        """Whether the episode belongs to an evaluation."""
        return self._state.call.start.data_set is not None

    @property
    def max_turns(self) -> int:
        """Maximum number of the model's turns; a very large number if the run has no limit."""
        return self._state.settings.max_turns or sys.maxsize

    @property
    def tools(self) -> tuple[Any, ...]:
        """The tool schemas of the row (``--tool-key``)."""
        return self._state.tools

    @property
    def turns(self) -> tuple[ModelTurn, ...]:
        """All turns of all conversations so far."""
        return tuple(self._state.turns)

    @property
    def openai_base_url(self) -> str:
        """The address of the model for OpenAI clients: their calls are turns of this episode."""
        return f"{self.base_url}/v1"

    @property
    def base_url(self) -> str:
        """The address of the model for SGLang and Anthropic clients."""
        address = self._state.call.address
        return f"http://{address.host}:{address.port}"

    @property
    def keyed_url(self) -> str:
        """The address with the key in it, for clients of SGLang that take a URL and no key."""
        address = self._state.call.address
        return f"http://{address.key}:{address.secret}@{address.host}:{address.port}"

    @property
    def api_key(self) -> str:
        """The key that names this episode to the gateway."""
        return self._state.call.address.key

    def conversation(self, start: str | Sequence[Message]) -> Conversation:
        """Start another conversation from text or chat messages: another sample with its own reward."""
        settings = self._state.settings
        if isinstance(start, str):
            token_ids = settings.tokenizer.encode(start)
        else:
            messages = _messages(_items(start, "conversation takes text or chat messages"), "conversation")
            token_ids = conversation_ids(
                settings.tokenizer, messages, self.tools or None, self._state.template_variables
            )
        return Conversation(self._state, next(self._state.numbers), token_ids)

    async def call(
        self, function: Callable[..., Any], /, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        """Call a tool: ``async def`` on the loop, ``def`` in a thread.  Raises ToolFailed or ToolTimeout.

        Errors of turns that the tool asks for pass as they are.
        The limit is ``--tool-timeout-s``.  A thread that is late stays busy; only its result is given up.  Bind
        arguments with ``functools.partial`` if one of them may be named ``timeout_s``.
        """
        limit_s = self._state.settings.tool_timeout_s if timeout_s is None else timeout_s
        deadline = asyncio.timeout(limit_s)
        self.num_tool_calls += 1
        try:
            async with deadline:
                return await _result(function, *args, **kwargs)
        except (EpisodeEnded, SampleFailed, EngineError):  # of a tool that asks the model, which must not learn from it
            raise
        except (Exception, SystemExit) as error:  # SystemExit would end the event loop of all episodes, as by argparse
            self.num_tool_errors += 1
            if isinstance(error, TimeoutError) and deadline.expired():
                raise ToolTimeout(f"{name_of(function)}: no result within {limit_s:g} s") from error
            raise ToolFailed(f"{name_of(function)}: {type(error).__name__}: {error}") from error

    def verdict(self, end: EpisodeEnd | None = None) -> Verdict:
        """Return what was decided so far.  Raises RewardFailed for a reward that is none."""
        state = self._state
        key = state.settings.reward_keys.get(state.call.start.data_set)
        tools = {"episodes/tool_calls": self.num_tool_calls, "episodes/tool_errors": self.num_tool_errors}
        return Verdict(
            rewards={number: reward_of(value, key) for number, value in state.rewards.items() if value is not None},
            turn_rewards={
                turn.call: number_of(turn.reward, "a turn's reward") for turn in state.turns if turn.reward is not None
            },
            left_out=frozenset(turn.call for turn in state.turns if not turn.is_trained),
            end=end,
            metrics={name: float(value) for name, value in tools.items() if value},
            metadata=_changed(self.metadata, state.call.start.prompt.metadata),
        )


def _items(given: Any, takes: str) -> list[Any]:
    """Return the items of a sequence or an array.  Raises TypeError, also for bytes, whose items are integers."""
    if isinstance(given, bytes | bytearray | memoryview) or not isinstance(given, Iterable):
        raise TypeError(f"{takes}, got a {type(given).__name__}")
    return list(given)


def _messages(items: Sequence[Any], taker: str) -> list[Message]:
    """Return chat messages.  Raises TypeError, also for a dict without a role, which templates leave out."""
    for each in items:
        if not isinstance(each, Mapping):
            raise TypeError(f"{taker} takes chat messages that are dicts, got a {type(each).__name__} among them")
        if not isinstance(each.get("role"), str):
            keys = ", ".join(map(str, each)) or "no keys"
            raise TypeError(f"{taker} takes chat messages with a role, got a dict with {keys}")
    return list(items)


def _token_ids(seen: Sequence[Any]) -> list[int]:
    """Return token ids, also those of NumPy.  Raises TypeError."""
    try:
        return [index(each) for each in seen]
    except TypeError as error:
        raise TypeError(f"observe takes text, token ids or chat messages: {error}") from None


async def _result(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    tool = _unbound(function)
    is_async = inspect.iscoroutinefunction(tool) or inspect.iscoroutinefunction(type(tool).__call__)
    found = function(*args, **kwargs) if is_async else await asyncio.to_thread(function, *args, **kwargs)
    return await found if inspect.isawaitable(found) else found


def _unbound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function below arguments that ``functools.partial`` has bound."""
    while isinstance(function, partial):
        function = function.func
    return function


def _with(usual: SamplingParams, changes: Mapping[str, Any], settings: Mapping[str, Any]) -> SamplingParams:
    """Return the settings with changes; names that are no field are SGLang's.  Raises TypeError."""
    known = {name: value for name, value in settings.items() if name in _FIELDS}
    further = {name: value for name, value in settings.items() if name not in _FIELDS}
    if unknown := further.keys() - FURTHER_SETTINGS.keys():
        names = ", ".join(sorted(FURTHER_SETTINGS))
        raise TypeError(f"generate has no setting '{min(unknown)}'; further ones are {names}")
    return (
        replace(usual, **{**known, **changes}, extra={**usual.extra, **further})
        if known or changes or further
        else usual
    )


def _changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that were added or changed."""
    return {name: value for name, value in now.items() if name not in before or not _equal(value, before[name])}


def _equal(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except Exception:  # noqa: BLE001 (an array's, or a user's, comparison)
        return False


_FIELDS = frozenset(each.name for each in fields(SamplingParams)) - {"extra"}
