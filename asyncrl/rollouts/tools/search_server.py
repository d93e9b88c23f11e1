"""An HTTP server for search, which answers as the retriever of Search-R1 does.

python -m asyncrl.rollouts.tools.search_server --corpus corpus.jsonl --port 8000

POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": "7", "contents": "\\"Title\\"\\ntext"}, "score": 4.2}, ...]]}
POST /retrieve  {"queries": ["..."]}
    {"result": [[{"id": "7", "contents": "\\"Title\\"\\ntext"}, ...]]}
GET /health     {"documents": 1000}
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from asyncrl.errors import ConfigError
from asyncrl.rollouts.tools.search import Hit, SearchIndex

MOST_HITS = 100
"""Documents per query, at most."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the corpus and serve until a signal.  Returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        index = SearchIndex.of_file(options.corpus, options.index)
    except ConfigError as error:
        sys.stderr.write(f"search_server: {error}\n")
        return 2
    sys.stderr.write(f"search_server: {len(index)} documents on http://{options.host}:{options.port}/retrieve\n")
    web.run_app(application(index, topk=options.topk), host=options.host, port=options.port, print=None)
    return 0


def application(index: SearchIndex, *, topk: int = 3) -> web.Application:
    """Return the server of ``index``; ``topk`` is for requests that do not say it."""

    async def retrieve(request: web.Request) -> web.Response:
        try:
            queries, limit, with_scores = _read(await request.read(), topk)
        except ValueError as error:
            return _answer({"detail": str(error)}, status=400)
        found = await asyncio.to_thread(index.search_all, queries, limit=limit)
        return _answer({"result": [[_entry(hit, with_scores) for hit in hits] for hits in found]})

    async def health(request: web.Request) -> web.Response:
        return _answer({"documents": len(index)})

    server = web.Application()
    server.add_routes([web.post("/retrieve", retrieve), web.get("/health", health)])
    return server


def _read(body: bytes, topk: int) -> tuple[list[str], int, bool]:
    """Return queries, their limit and whether scores are wanted.  Raises ValueError."""
    values = orjson.loads(body)  # its JSONDecodeError is a ValueError
    if not isinstance(values, dict):
        raise ValueError("the body must be a JSON object")  # noqa: TRY004 - one error for all wrong requests
    queries, limit = values.get("queries"), values.get("topk") or topk
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError(f"queries must be a list of strings, got {queries!r:.100}")
    if not isinstance(limit, int) or not 1 <= limit <= MOST_HITS:
        raise ValueError(f"topk must be 1 to {MOST_HITS}, got {limit!r:.100}")
    return queries, limit, bool(values.get("return_scores"))


def _entry(hit: Hit, with_score: bool) -> dict[str, Any]:
    document = {"id": hit.document.id, "contents": hit.document.contents}
    return {"document": document, "score": hit.score} if with_score else document


def _answer(values: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(values), status=status, content_type="application/json")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asyncrl.rollouts.tools.search_server", description="BM25 search over HTTP.")
    parser.add_argument("--corpus", type=Path, required=True, help="JSONL file of documents.")
    parser.add_argument("--index", type=Path, help="Folder that keeps the index between starts.")
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen on.")
    parser.add_argument("--port", type=int, default=8000, help="Port to listen on.")
    parser.add_argument("--topk", type=int, default=3, help="Documents per query for requests without topk.")
    return parser


if __name__ == "__main__":
    sys.exit(main())
