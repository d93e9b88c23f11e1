"""Search: the index, its corpus files, and the server that answers as Search-R1's retriever does."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from asyncrl.errors import ConfigError
from asyncrl.rollouts.tools.search import Document, SearchIndex, passages, read_corpus
from asyncrl.rollouts.tools.search_server import application, main

CITIES = [("Lindholm", "Lindholm was founded by Vera Castellan."), ("Ostrava", "Ostrava lies on the river Oder.")]


def index() -> SearchIndex:
    return SearchIndex([Document(id=str(i), title=title, text=text) for i, (title, text) in enumerate(CITIES)])


def corpus(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_best_document_comes_first_and_others_without_a_shared_word_do_not_come() -> None:
    hits = asyncio.run(index().search("Who founded Lindholm?", limit=5))
    assert [hit.document.title for hit in hits] == ["Lindholm"]
    assert passages(hits) == "Doc 1(Title: Lindholm) Lindholm was founded by Vera Castellan."
    assert passages(asyncio.run(index().search("???"))) == "No document was found."


def test_corpora_have_contents_or_text(tmp_path: Path) -> None:
    rows = [{"id": "a", "contents": '"Ostrava"\non the Oder'}, {"title": "Lindholm", "text": "founded"}]
    documents = read_corpus(corpus(tmp_path / "c.jsonl", *map(json.dumps, rows), ""))
    assert documents[0] == Document(id="a", title="Ostrava", text="on the Oder")
    assert documents[0].contents == rows[0]["contents"]
    assert documents[1] == Document(id="2", title="Lindholm", text="founded")


@pytest.mark.parametrize("line", ["[1]", '{"title": "x"}', '{"contents": 3}', "{"])
def test_wrong_row_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=r"c\.jsonl:2: a document is a JSON object with 'contents' or 'text'"):
        read_corpus(corpus(tmp_path / "c.jsonl", '{"text": "x"}', line))


def test_stored_index_answers_alike_and_one_of_other_documents_is_refused(tmp_path: Path) -> None:
    path = corpus(tmp_path / "c.jsonl", *(json.dumps({"title": title, "text": text}) for title, text in CITIES))
    first = SearchIndex.of_file(path, tmp_path / "index").search_all(["river Oder"])
    assert SearchIndex.of_file(path, tmp_path / "index").search_all(["river Oder"]) == first
    corpus(path, '{"text": "another"}')
    with pytest.raises(ConfigError, match="has an index of 2 documents, the corpus has 1"):
        SearchIndex.of_file(path, tmp_path / "index")


@pytest.mark.parametrize("change", [list.reverse, lambda rows: rows[0].update(text="Vera Castellan moved.")])
def test_a_stored_index_of_as_many_other_documents_is_refused(tmp_path: Path, change: Any) -> None:
    rows = [{"title": title, "text": text} for title, text in CITIES]
    path = corpus(tmp_path / "c.jsonl", *map(json.dumps, rows))
    SearchIndex.of_file(path, tmp_path / "index")
    change(rows)
    corpus(path, *map(json.dumps, rows))
    with pytest.raises(ConfigError, match=r"index has an index of other documents; delete the folder"):
        SearchIndex.of_file(path, tmp_path / "index")


def test_an_index_that_an_earlier_version_stored_is_read(tmp_path: Path) -> None:
    path = corpus(tmp_path / "c.jsonl", *(json.dumps({"title": title, "text": text}) for title, text in CITIES))
    SearchIndex.of_file(path, tmp_path / "index")
    (tmp_path / "index" / "documents.digest").unlink()
    assert len(SearchIndex.of_file(path, tmp_path / "index")) == 2


def test_server_refuses_a_missing_corpus_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--corpus", str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err == f"search_server: corpus {tmp_path / 'none.jsonl'}: No such file or directory\n"


def answers(*bodies: Any) -> list[tuple[int, Any]]:
    async def ask() -> list[tuple[int, Any]]:
        async with TestClient(TestServer(application(index()))) as client:
            found = []
            for body in bodies:
                reply = await client.post("/retrieve", data=body if isinstance(body, str) else json.dumps(body))
                found.append((reply.status, await reply.json()))
            return found

    return asyncio.run(ask())


def test_server_answers_as_the_retriever_of_search_r1() -> None:
    queries = ["founded Lindholm", "river"]
    (status, nested), (_, flat) = answers(
        {"queries": queries, "topk": 1, "return_scores": True}, {"queries": queries, "topk": 1, "return_scores": False}
    )
    assert status == 200
    document = {"id": "0", "contents": '"Lindholm"\nLindholm was founded by Vera Castellan.'}
    assert [hit["document"] for hit in nested["result"][0]] == [document]
    assert nested["result"][0][0]["score"] > 0
    assert flat["result"][0] == [document]
    assert [hits[0]["id"] for hits in flat["result"]] == ["0", "1"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{", "unexpected end of data"),
        ([], "the body must be a JSON object"),
        ({"queries": "x"}, "queries must be a list of strings, got 'x'"),
        ({"queries": ["x"], "topk": 1000}, "topk must be 1 to 100, got 1000"),
    ],
)
def test_wrong_request_gets_one_line(body: Any, message: str) -> None:
    [(status, answer)] = answers(body)
    assert status == 400
    assert message in answer["detail"]
