"""The checkpoint's tokenizer and chat template.

Reads ``tokenizer.json`` with the ``tokenizers`` library, which transformers uses as well, or ``tiktoken.model``.
``transformers.AutoTokenizer`` would import torch, which the driver does not need: 5 to 14 s on two cores.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers  # type: ignore[import-untyped]

from asyncrl.data.byte_level import bytes_of_tokens, joined
from asyncrl.data.incremental_text import BytesText, IncrementalText, TailText, ids_of_bytes
from asyncrl.data.tiktoken_words import RANKS_FILE, load_tiktoken
from asyncrl.errors import DataError

Message = dict[str, Any]
"""One chat message: role, content and any other keys that the template uses."""


def load_tokenizer(path: Path, *, skip_special_tokens: bool = False) -> "TextTokenizer":
    """Load the tokenizer of a local checkpoint folder.  Raises DataError if its files are missing or unreadable.

    With ``skip_special_tokens``, decoded texts lack special tokens.
    """
    words = load_words(path)
    chat, with_tools = _chat_templates(path)
    return TextTokenizer(words, chat, with_tools, skip_special_tokens=skip_special_tokens)


def load_words(path: Path) -> Any:
    """Read ``tokenizer.json``, or ``tiktoken.model`` where there is no ``tokenizer.json``.  Raises DataError."""
    file = path / "tokenizer.json"
    if not file.is_file():
        if (path / RANKS_FILE).is_file():
            return load_tiktoken(path)
        raise DataError(f"{file}: no such file; save_pretrained() of the model's AutoTokenizer writes it")
    try:
        words = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise DataError(f"{file}: not a tokenizer: {error}") from error
    words.no_padding()
    words.no_truncation()
    return words


class TextTokenizer:
    """Converts text and chats to tokens and back; decoded texts keep special tokens unless told to skip them."""

    def __init__(
        self,
        words: tokenizers.Tokenizer,
        chat: jinja2.Template | None,
        with_tools: jinja2.Template | None = None,
        *,
        skip_special_tokens: bool = False,
    ) -> None:
        """``with_tools`` takes the place of ``chat`` for chats with tools, if the checkpoint has such a template."""
        self._words = words
        self._chat = chat
        self._with_tools = with_tools or chat
        self._skips = skip_special_tokens
        self._bytes = bytes_of_tokens(words, skip_special_tokens=skip_special_tokens)
        self._skipped: frozenset[int] = frozenset()
        self._single_bytes: frozenset[int] = frozenset()
        if self._bytes is None:
            added = words.get_added_tokens_decoder() if skip_special_tokens else {}
            self._skipped = frozenset(number for number, token in added.items() if token.special)
            self._single_bytes = ids_of_bytes(words)

    def skipping(self, skip_special_tokens: bool) -> "TextTokenizer":
        """Return this tokenizer with decoded texts that lack special tokens, or keep them."""
        if skip_special_tokens == self._skips:
            return self
        return TextTokenizer(self._words, self._chat, self._with_tools, skip_special_tokens=skip_special_tokens)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without added special tokens."""
        token_ids: list[int] = self._words.encode(text, add_special_tokens=False).ids
        return token_ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of ``text``, and the first character and the end of each token.

        Raises DataError if the tokenizer has no offsets.
        """
        found = self._words.encode(text, add_special_tokens=False)
        if not hasattr(found, "offsets"):
            raise DataError(f"a tokenizer of {RANKS_FILE} has no offsets, which loss masks of chats need")
        return found.ids, found.offsets

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, tokenised on all cores."""
        return [found.ids for found in self._words.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """Return the text of ``token_ids``.  Ids that the tokenizer lacks have no text."""
        if self._bytes is not None:
            with suppress(IndexError):  # a padded vocabulary has ids that the tokenizer lacks
                return joined(self._bytes, token_ids).decode("utf-8", "replace")
        text: str = self._words.decode(list(token_ids), skip_special_tokens=self._skips)
        return text

    def incremental(self) -> IncrementalText:
        """Return an empty text that grows by tokens: at each time ``decode`` of all its tokens."""
        if self._bytes is not None:
            return BytesText(self._bytes)
        return TailText(self.decode, self._skipped, self._single_bytes)

    @property
    def has_chat_template(self) -> bool:
        """Whether ``render`` has a template."""
        return self._chat is not None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render a chat with the model's template, up to the start of the answer or of no answer.

        ``tools`` are tool schemas, ``variables`` further variables of the template.  Raises DataError if there is no
        template or it refuses the messages.
        """
        template = self._chat if tools is None else self._with_tools
        if template is None:
            raise DataError("apply-chat-template: the checkpoint has no chat template")
        tools = None if tools is None else list(tools)
        chat = {"messages": list(messages), "tools": tools, "documents": None}
        given = {**chat, "add_generation_prompt": add_generation_prompt}
        try:
            return template.render({**variables, **given})
        except Exception as error:  # a template is a program: it raises whatever Python raises on a value
            raise DataError(f"the chat template refuses the messages: {error}") from error


def _chat_templates(path: Path) -> tuple[jinja2.Template | None, jinja2.Template | None]:
    """Return the template of a checkpoint, and the one for chats with tools where that is another."""
    settings = _json(path / "tokenizer_config.json")
    source, with_tools = settings.get("chat_template"), None
    if isinstance(source, list):  # several named templates
        named = {each["name"]: each["template"] for each in source}
        source, with_tools = named.get("default"), named.get("tool_use")
    if (file := path / "chat_template.jinja").is_file():
        source = file.read_text(encoding="utf-8")
    if (file := path / "additional_chat_templates" / "tool_use.jinja").is_file():
        with_tools = file.read_text(encoding="utf-8")
    specials = {name: _token(value) for name, value in settings.items() if name.endswith("_token")}
    known = {name: text for name, text in specials.items() if text is not None}
    chat, other = (None if each is None else _compiled(path, each, known) for each in (source, with_tools))
    return chat, other


def _compiled(path: Path, source: str, specials: dict[str, str]) -> jinja2.Template:
    room = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    room.filters["tojson"] = _tojson
    room.globals["raise_exception"] = _refuse
    room.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        template = room.from_string(source, globals=specials)
    except jinja2.TemplateError as error:
        raise DataError(f"{path}: the chat template does not compile: {error}") from error
    template.globals = dict(template.globals)  # read for each chat; a ChainMap takes a quarter of the time
    return template


class _Generation(jinja2.ext.Extension):
    """The ``{% generation %}`` tag, which marks the assistant's part for loss masks.  Ignored here."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter of transformers.  That of jinja2 escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _token(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    return found if isinstance(found, dict) else {}
