"""The prose of the code and of the pages: openings of docstrings, words that are not used, lengths of sentences."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("asyncrl", "benchmarks", "configs", "tests", "website")
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]

MOST_WORDS = 30
"""Words of a sentence in a page, at most."""

_WORDS = "What|Of|Where|Who|How|It|That|By|As"
OPENING = re.compile(rf"(?:{_WORDS})\b")
"""A docstring opens with an imperative verb or a noun phrase instead."""
HAS_OPENING = re.compile(rf"[\"']\\?\s*(?:{_WORDS})\b")
"""Any string of a source that opens so: only such a source is parsed, which takes longer."""

UNUSED = (
    "beside",
    "go on",
    "goes on",
    "going on",
    "gone on",
    "went on",
    "nobody",
    "those that",
    "what is let go",
    "says so",
    "of its own",
    "by its name",
)
_GAP = r"[\s#\"']+"
"""Between two words of a phrase: also a line break, within a comment or between the pieces of a string."""
_ANY_UNUSED = "|".join(phrase.replace(" ", _GAP) for phrase in UNUSED)
UNUSED_WORDS = re.compile(rf"(?<![\w`-])(?:{_ANY_UNUSED})(?![\w`-])", re.IGNORECASE)
"""Names such as ``go_on`` and ``--update-weights-during-training`` are no match."""


# ---- Python


def sources(folder: str) -> list[Path]:
    """Return the files of ``folder`` and below, but for this one; a file stands for itself."""
    path = ROOT / folder
    return [path] if path.is_file() else sorted(set(path.rglob("*.py")) - {Path(__file__)})


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, those under fields and constants included."""
    statements: list[ast.AST] = [ast.parse(source)]
    while statements:
        match statement := statements.pop():
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield statement.lineno, text.strip()
            case ast.Module() | ast.stmt() | ast.excepthandler() | ast.match_case():
                for name in ("body", "orelse", "finalbody", "handlers", "cases"):
                    statements += getattr(statement, name, ())


def only_prose(source: str) -> str:
    """Return ``source`` with zero bytes in the place of everything but comments and strings; lines stay."""
    kept = [[c if c.isspace() else "\0" for c in line] for line in source.split("\n")]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, tokenize.FSTRING_MIDDLE):
            (row, column), lines = token.start, token.string.split("\n")
            for number, line in enumerate(lines):
                start = column if number == 0 else 0
                kept[row - 1 + number][start : start + len(line)] = line
    return "\n".join("".join(line) for line in kept)


def unused_words(text: str) -> list[tuple[int, str]]:
    """Return the line and the phrase of each match."""
    found = UNUSED_WORDS.finditer(text)
    return [(text.count("\n", 0, match.start()) + 1, " ".join(match[0].split())) for match in found]


@pytest.mark.parametrize("folder", [*FOLDERS, "train.py", "train_async.py"])
def test_docstrings_open_with_a_verb_or_a_noun(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in sources(folder)
        if HAS_OPENING.search(source := path.read_text())
        for line, text in sorted(docstrings(source))
        if OPENING.match(text)
    ]
    assert not found, listed(found)


@pytest.mark.parametrize("folder", [*FOLDERS, "train.py", "train_async.py"])
def test_comments_and_strings_do_without_some_words(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {phrase}"
        for path in sources(folder)
        if UNUSED_WORDS.search(text := path.read_text())
        for line, phrase in unused_words(only_prose(text))
    ]
    assert not found, listed(found)


def listed(found: list[str]) -> str:
    return "\n".join([f"{len(found)} places", *found])


# ---- pages

FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2`*[ ]*$", re.DOTALL | re.MULTILINE)
INDENTED_CODE = re.compile(r"(?:(?<=\n\n)|\A)(?: {4}.*\n?)+")
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)\s]*\)")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
LATER_ITEM = re.compile(r"^\s*(?!1[.)])\d+[.)]\s")
"""Begins an item only after another one: in a paragraph it is a number that ends a sentence."""
TABLE_RULE = re.compile(r"\s*\|?\s*:?-{2,}")
BREAK = re.compile(r"<br\s*/?>")
TAG = re.compile(r"</?\w[^>]*>")
END = re.compile(r"(?<!\.)[.!?][\"')\]*_]*\s+")
"""The end of a sentence; three dots are none."""
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|cf|approx|Fig|Eq)\.$")


def sentences(page: str) -> list[str]:
    """Return the sentences of a page in Markdown, without blocks of code; inline code is one word."""
    return [sentence for block in blocks(page) for sentence in split(plain(block))]


def blocks(page: str) -> Iterator[str]:
    """Yield each heading, paragraph, list item and table cell, on one line."""
    lines: list[str] = []
    is_in_list = False
    for line in [*without_code(page).splitlines(), ""]:
        is_row, is_heading = line.lstrip().startswith("|"), line.startswith("#")
        is_item = bool(ITEM.match(line)) and (not lines or is_in_list or not LATER_ITEM.match(line))
        if lines and (not line.strip() or is_row or is_heading or is_item):
            yield " ".join(lines)
            lines = []
        if is_row:
            yield from cells(line)
        elif is_heading:
            yield line.lstrip("# ")
        elif line.strip():
            is_in_list = is_item or (is_in_list and bool(lines))
            lines.append((ITEM.sub("", line) if is_item else line).strip().removeprefix("> "))


def without_code(page: str) -> str:
    """Return ``page`` without fenced and indented code.  An indented line within a list is text."""
    page = re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)
    return INDENTED_CODE.sub("", FENCE.sub("\n", page))


def cells(row: str) -> Iterator[str]:
    if not TABLE_RULE.match(row):
        bare = CODE.sub("code", row).strip().strip("|").replace(r"\|", "/")
        for cell in bare.split("|"):
            yield from BREAK.split(cell)


def plain(block: str) -> str:
    """Return the words of a block without marks: the text of links, one word for inline code."""
    return TAG.sub("", LINK.sub(r"\1", CODE.sub("code", block))).replace("**", "")


def split(text: str) -> Iterator[str]:
    start = 0
    for end in END.finditer(text):
        if not ABBREVIATION.search(text[: end.start() + 1]):
            yield text[start : end.end()].strip()
            start = end.end()
    if text[start:].strip():
        yield text[start:].strip()


def num_words(sentence: str) -> int:
    """Return the number of words; a dash or a sign between spaces is none."""
    return sum(any(map(str.isalnum, word)) for word in sentence.split())


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES])
def test_sentences_are_short(page: str) -> None:
    found = [
        f"{num_words(each)}: {each}" for each in sentences((ROOT / page).read_text()) if num_words(each) > MOST_WORDS
    ]
    assert not found, listed(found)


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES])
def test_pages_do_without_some_words(page: str) -> None:
    found = [f"{page}:{line}: {phrase}" for line, phrase in unused_words((ROOT / page).read_text())]
    assert not found, listed(found)


# ---- the functions above


def test_docstrings_are_found() -> None:
    source = '''
"""A module."""
RATE = 3
"""Of a constant."""
rate = lambda: "That is text."
class A:
    """A class."""
    field: int
    """By field."""
    def method(self):
        """  That is it."""
        text = """No docstring."""
async def run():
    try:
        pass
    except ValueError:
        """As a statement."""
'''
    found = list(docstrings(source))
    assert sorted(text for _, text in found) == [
        "A class.",
        "A module.",
        "As a statement.",
        "By field.",
        "Of a constant.",
        "That is it.",
    ]
    assert (4, "Of a constant.") in found


@pytest.mark.parametrize("text", ["What is sent.", "Of AdamW.", "It lives.", "It's lost.", "As before.", "How: see."])
def test_openings_are_found(text: str) -> None:
    assert OPENING.match(text)


@pytest.mark.parametrize("text", ["Whatever is sent.", "Offload.", "Items.", "Bytes.", "Assert.", "The ...", "Whom"])
def test_other_openings_pass(text: str) -> None:
    assert OPENING.match(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "# it goes on",
        "# training goes\n# on",
        '"""Samples beside\n    others."""',
        "f'{x} says so'",
        "nobody = 'nobody'",
        "log('it went '\n    'on')",
        "x = 1  # Beside that",
        "'in a folder of its  own'",
    ],
)
def test_unused_words_are_found(text: str) -> None:
    assert len(unused_words(only_prose(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "await engine.go_on()",
        "goes_on = going_on_beside = 1",
        "beside.create_task(work)",
        "'--update-weights-during-training'",
        "# ``beside`` is a task group",
        "'besides'",
        "'cargo on board'",
        "'go'; on = 'x'",
        "'those', that",
    ],
)
def test_names_are_no_words(text: str) -> None:
    assert unused_words(only_prose(text)) == []


def test_unused_words_have_their_line() -> None:
    assert unused_words(only_prose("x = 1\n# fine\n'''\nit goes\non'''")) == [(4, "goes on")]


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("One sentence. Two sentences! Three?", ["One sentence.", "Two sentences!", "Three?"]),
        ("A line\nthat continues. And\nanother.", ["A line that continues.", "And another."]),
        ("# A heading\nText.", ["A heading", "Text."]),
        ("Version 0.5.16 is read. slime's is not.", ["Version 0.5.16 is read.", "slime's is not."]),
        ("Use tables, e.g. this one, and 1.5 GB.", ["Use tables, e.g. this one, and 1.5 GB."]),
        ("Wait ... and see.", ["Wait ... and see."]),
        ("**Bold.** Text (as here). [A link](x.md#y).", ["Bold.", "Text (as here).", "A link."]),
        ("![a picture](x.svg)\n\nText", ["a picture", "Text"]),
        ("Run `a b. c d` now. `x.py` is next.", ["Run code now.", "code is next."]),
        ("Intro:\n\n- one\n  more. Two.\n- three\n1. four", ["Intro:", "one more.", "Two.", "three", "four"]),
        ("| a | b. C |\n|---|---|\n| `x|y` | d\\|e<br>f |", ["a", "b.", "C", "code", "d/e", "f"]),
        ("Text.\n```\ncode here. And here.\n```\nMore.", ["Text.", "More."]),
        ("- item\n\n  ```sh\n  code\n  ```\n- next", ["item", "next"]),
        ("As in bfloat\n16. It is 2. That\nis all.", ["As in bfloat 16.", "It is 2.", "That is all."]),
        ("1. one\n2. two\n10. ten", ["one", "two", "ten"]),
        ("> Quoted\n> twice. Once.", ["Quoted twice.", "Once."]),
        ("Text:\n\n    T·B + x <= y\n\nMore.", ["Text:", "More."]),
        ("- a\n    continued here.", ["a continued here."]),
        ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
        ("<!-- a. comment. -->Text <b>here</b>.", ["Text here."]),
    ],
)
def test_sentences_are_split(page: str, expected: list[str]) -> None:
    assert sentences(page) == expected


@pytest.mark.parametrize(
    ("sentence", "expected"), [("", 0), ("One.", 1), ("S = 2 - or 4", 4), ("code (code)", 2), ("two-part word's", 2)]
)
def test_words_are_counted(sentence: str, expected: int) -> None:
    assert num_words(sentence) == expected
