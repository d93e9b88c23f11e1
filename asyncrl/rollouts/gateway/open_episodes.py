"""The episodes whose requests are accepted now, and the episode that a request belongs to."""

import asyncio
import base64
import binascii
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from asyncrl.episodes import GeneratedTurn
from asyncrl.rollouts.gateway.chats import AnswerMemory
from asyncrl.rollouts.gateway.contexts import Context, Encoder, TextContexts
from asyncrl.rollouts.gateway.refusals import ABORTED, RequestRefused, over, refusal_of, unknown
from asyncrl.rollouts.gateway.rendering import ChatContexts
from asyncrl.rollouts.interfaces import EpisodeAddress
from asyncrl.rollouts.record import TokenIds, ids_of
from asyncrl.rollouts.session import EpisodeSession
from asyncrl.types import Chunk, SamplingParams

_MOST_OVER = 65_536
"""Keys of episodes that are over which are remembered, so that their requests get 410 and not 401."""
_NO_KEYS = frozenset({"EMPTY", "empty", "None", "none", "dummy"})
"""Keys that programs send to servers which need none."""
RETOKENIZED = "episodes/retokenized_tokens"


class OpenEpisode:
    """One episode at the gateway."""

    def __init__(
        self,
        session: EpisodeSession,
        address: EpisodeAddress,
        encoder: Encoder,
        on_bug: Callable[[Exception], None],
    ) -> None:
        self.session = session
        self.address = address
        self.memory = AnswerMemory()
        self.chats = ChatContexts(encoder, session.start.prompt, self.memory)
        self.texts = TextContexts(encoder, session.start.prompt, session.record)
        self._encoder = encoder
        self._on_bug = on_bug
        self._in_progress: dict[asyncio.Timeout, str] = {}
        """A scope for each request in progress, with the id that its client gave it."""
        self._is_over = False

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """Variables of the chat template for this episode's prompt."""
        return self.session.start.prompt.template_variables

    def request(self, request_id: str = "") -> "_Request":
        """Return a block that refuses requests after the end of the episode, and ends when the episode ends before it.

        The block raises RequestRefused.
        """
        return _Request(self, request_id)

    def begin(self, scope: asyncio.Timeout, request_id: str) -> None:
        """Note a request in progress.  Raises RequestRefused after the end of the episode."""
        if self._is_over or self.session.is_over:
            raise over(self.session.start.name)
        self._in_progress[scope] = request_id

    def end(self, scope: asyncio.Timeout) -> None:
        """Forget a request."""
        self._in_progress.pop(scope, None)

    def interruption(self) -> RequestRefused:
        """Return the reason why a request was ended."""
        return over(self.session.start.name) if self._is_over else RequestRefused(499, "Abort by client", ABORTED)

    def abort(self, request_id: str) -> None:
        """End the requests whose ids begin with ``request_id``, as SGLang does."""
        for scope, own_id in self._in_progress.items():
            if own_id and own_id.startswith(request_id):
                _end(scope)

    def close(self) -> None:
        """End all requests.  Idempotent."""
        self._is_over = True
        for scope in self._in_progress:
            _end(scope)

    async def generate(
        self, context: Context, sampling: SamplingParams, on_chunk: Callable[[Chunk], None] | None = None
    ) -> GeneratedTurn:
        """Generate one turn behind the context.  Raises RequestRefused."""
        if context.num_retokenized:
            self.session.counts[RETOKENIZED] += context.num_retokenized
            self._encoder.warn_of_cut(self.session.start.name)
        try:
            return await self.session.generate(
                context.token_ids, sampling, reason=context.reason, kept=context.kept, on_chunk=on_chunk
            )
        except RequestRefused:
            raise
        except Exception as error:
            if (refusal := refusal_of(error)) is None:
                self._on_bug(error)
                raise
            raise refusal from error

    def num_cached(self, context: Context) -> int:
        """Return the number of first tokens of the context that an earlier call of the episode had as well."""
        line = self.session.record.longest_prefix(context.token_ids)
        return 0 if line is None else line.num_tokens


class _Request:
    """One request in progress.  A class, because a generator would take a twentieth of the gateway's time."""

    def __init__(self, episode: OpenEpisode, request_id: str) -> None:
        self._episode = episode
        self._id = request_id
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        self._episode.begin(self._scope, self._id)
        await self._scope.__aenter__()

    async def __aexit__(self, *failure: Any) -> None:
        self._episode.end(self._scope)
        try:
            await self._scope.__aexit__(*failure)
        except TimeoutError as error:
            raise self._episode.interruption() from error


def _end(scope: asyncio.Timeout) -> None:
    if not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time())


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The tokens or the text of a request, by which its episode may be found."""

    token_ids: TokenIds = field(default_factory=lambda: ids_of(()))
    text: str = ""

    def known(self, episode: OpenEpisode) -> int:
        """Return the length of the longest recorded line, or of the prompt, that the content extends; 0 if none."""
        if self.text:
            return episode.texts.longest_match(self.text)
        session, prompt = episode.session, ids_of(episode.session.start.prompt.token_ids)
        line = session.record.longest_prefix(self.token_ids)
        if line is not None:
            return line.num_tokens
        return len(prompt) if not session.record.lines and self.token_ids[: len(prompt)] == prompt else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Over:
    """An episode that is over.  Its prompt is stored as hashes."""

    name: str
    text_len: int
    text_hash: int
    ids_len: int
    ids_hash: int

    def may_send(self, content: Content) -> bool:
        """Return whether the content begins with the prompt of the episode."""
        if content.text:
            return hash(content.text[: self.text_len]) == self.text_hash
        return hash(tuple(content.token_ids[: self.ids_len])) == self.ids_hash


class OpenEpisodes:
    """All open episodes, by key."""

    def __init__(self, encoder: Encoder, on_bug: Callable[[Exception], None]) -> None:
        self._encoder = encoder
        self._on_bug = on_bug
        self._by_key: dict[str, OpenEpisode] = {}
        self._over: OrderedDict[str, _Over] = OrderedDict()

    def __iter__(self) -> Iterator[OpenEpisode]:
        return iter(tuple(self._by_key.values()))

    def open(self, session: EpisodeSession, host: str, port: int) -> EpisodeAddress:
        """See ``Gateway.open``."""
        key, secret = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
        address = EpisodeAddress(host=host, port=port, key=key, secret=secret)
        self._by_key[key] = OpenEpisode(session, address, self._encoder, self._on_bug)
        return address

    def close(self, address: EpisodeAddress) -> None:
        """See ``Gateway.close``."""
        episode = self._by_key.pop(address.key, None)
        if episode is None:
            return
        episode.close()
        start = episode.session.start
        self._over[address.key] = _Over(
            name=start.name,
            text_len=len(start.prompt.text),
            text_hash=hash(start.prompt.text),
            ids_len=len(start.prompt.token_ids),
            ids_hash=hash(start.prompt.token_ids),
        )
        if len(self._over) > _MOST_OVER:
            self._over.popitem(last=False)

    def find(self, headers: Mapping[str, str], content: Content | None = None) -> OpenEpisode:
        """Return the episode that a request belongs to.  Raises RequestRefused.

        A request without a key belongs to the only episode whose longest record or prompt it extends.  So does one with
        the key of an episode that is over, unless it begins with that episode's prompt: some programs keep the address
        of their first episode.
        """
        keys = [(key, secret) for key, secret in _keys(headers) if key not in _NO_KEYS]
        for key, secret in keys:
            episode = self._by_key.get(key)
            if episode is not None:
                if secret is not None and not _is_same(secret, episode.address.secret):
                    raise unknown()
                return episode
        ended = next((self._over[key] for key, _ in keys if key in self._over), None)
        if ended is not None:
            found = [] if content is None or ended.may_send(content) else self._by_content(content)
            if len(found) != 1:
                raise over(ended.name)
            return found[0]
        if keys or content is None:
            raise unknown()
        return self._only(self._by_content(content))

    def _by_content(self, content: Content) -> list[OpenEpisode]:
        """Return the episodes of which the content extends the longest record or prompt."""
        found = [(content.known(episode), episode) for episode in self._by_key.values()]
        longest = max((size for size, _ in found), default=0)
        return [episode for size, episode in found if size == longest > 0]

    @staticmethod
    def _only(found: list[OpenEpisode]) -> OpenEpisode:
        if len(found) != 1:
            which = f"fits {len(found)} open episodes" if found else "extends the record of no open episode"
            raise RequestRefused(401, f"the request has no key, and its content {which}; {unknown()}")
        return found[0]


def _is_same(given: str, secret: str) -> bool:
    return secrets.compare_digest(given.encode(), secret.encode())  # texts may have ASCII characters only


def _keys(headers: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """Yield each key that the headers name, with its secret if there is one."""
    kind, _, value = headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer" and value.strip():
        yield value.strip(), None
    if kind.lower() == "basic":
        with suppress(binascii.Error, UnicodeDecodeError):
            key, _, secret = base64.b64decode(value.strip(), validate=True).decode().partition(":")
            yield key, secret
    for name in ("x-api-key", "X-SMG-Routing-Key"):
        if found := headers.get(name, "").strip():
            yield found, None
