"""Search over a local corpus with BM25, in this process.

    index = SearchIndex.of_file("corpus.jsonl")
    hits = await index.search("Who founded Lindholm?", limit=3)
    passages(hits)                    # what the model should see

Needs ``asyncrl[search]``.  ``search_server`` serves the same index over HTTP.
"""

import asyncio
import hashlib
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from asyncrl.errors import ConfigError

_DIGEST = "documents.digest"
"""The file in the folder of an index that tells its documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text of a corpus."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """The title in quotation marks, a line end and the text, as corpora of Search-R1 have it."""
        return f'"{self.title}"\n{self.text}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A document that shares words with a query; ``score`` is above 0."""

    document: Document
    score: float


class SearchIndex:
    """A BM25 index.  Safe to search from many tasks and threads."""

    def __init__(self, documents: Sequence[Document], folder: Path | None = None) -> None:
        """Build the index, or read it from ``folder`` where an earlier call with the same documents stored it.

        Raises ConfigError if there is no document, if the stored index is of other documents, or if bm25s is not
        installed.
        """
        if not documents:
            raise ConfigError("a search index needs at least one document")
        self._documents = documents
        self._bm25s = _library()
        if folder is not None and (folder / "params.index.json").exists():
            self._index = self._stored(folder)
            return
        self._index = self._built()
        if folder is not None:
            self._index.save(folder, show_progress=False)
            (folder / _DIGEST).write_text(_digest(documents))

    @classmethod
    def of_file(cls, corpus: str | Path, folder: Path | None = None) -> "SearchIndex":
        """Index a JSONL file of documents: see ``read_corpus``."""
        return cls(read_corpus(corpus), folder)

    def __len__(self) -> int:
        return len(self._documents)

    async def search(self, query: str, *, limit: int = 3) -> list[Hit]:
        """Return the best documents, best first, without blocking the event loop."""
        return (await asyncio.to_thread(self.search_all, [query], limit=limit))[0]

    def search_all(self, queries: Sequence[str], *, limit: int = 3) -> list[list[Hit]]:
        """Return the best documents of each query."""
        if not queries:
            return []
        count = min(limit, len(self._documents))
        found, scores = self._index.retrieve(self._tokens(queries), k=count, show_progress=False)
        return [
            [
                Hit(document=self._documents[place], score=float(score))
                for place, score in zip(places, row, strict=True)
                if score > 0
            ]
            for places, row in zip(found, scores, strict=True)
        ]

    def _built(self) -> Any:
        index = self._bm25s.BM25()
        index.index(self._tokens([each.contents for each in self._documents]), show_progress=False)
        return index

    def _stored(self, folder: Path) -> Any:
        index = self._bm25s.BM25.load(folder, show_progress=False)
        if index.scores["num_docs"] != len(self._documents):
            raise ConfigError(
                f"{folder} has an index of {index.scores['num_docs']} documents, the corpus has "
                f"{len(self._documents)}; delete the folder"
            )
        # Hits are places in the corpus: an index of as many other documents would return wrong ones.
        if (file := folder / _DIGEST).exists() and file.read_text() != _digest(self._documents):
            raise ConfigError(f"{folder} has an index of other documents; delete the folder")
        return index

    def _tokens(self, texts: Sequence[str]) -> Any:
        return self._bm25s.tokenize(texts, stopwords="en", show_progress=False)


def read_corpus(path: str | Path) -> list[Document]:
    """Read a JSONL file whose rows have ``contents`` (title, line end, text) or ``text`` and perhaps ``title``.

    ``id`` may be left out.  Raises ConfigError with the file and line of a wrong row.
    """
    documents = []
    try:
        with Path(path).open("rb") as lines:
            documents = [_document(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    except OSError as error:
        raise ConfigError(f"corpus {path}: {error.strerror}") from error
    return documents


def passages(hits: Iterable[Hit]) -> str:
    """Return the documents as numbered passages, or a line that there are none."""
    lines = [
        f"Doc {number}(Title: {hit.document.title}) {hit.document.text}" for number, hit in enumerate(hits, start=1)
    ]
    return "\n".join(lines) or "No document was found."


def _digest(documents: Iterable[Document]) -> str:
    """Return a digest of all documents, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for document in documents:
        digest.update(repr(document).encode())
    return digest.hexdigest()


def _document(line: bytes, place: str) -> Document:
    try:
        row = orjson.loads(line)
        name = str(row.get("id", place.rpartition(":")[2]))
        if "contents" in row:
            title, _, text = row["contents"].partition("\n")
            return Document(id=name, title=title.strip().strip('"'), text=text.strip())
        return Document(id=name, title=row.get("title", ""), text=row["text"])
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{place}: a document is a JSON object with 'contents' or 'text', got {line[:60]!r}"
        ) from error


def _library() -> Any:
    try:
        return importlib.import_module("bm25s")
    except ImportError as error:
        raise ConfigError("search needs the package bm25s: install asyncrl[search]") from error
