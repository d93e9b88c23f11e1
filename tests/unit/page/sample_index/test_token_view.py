import math
import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.data.token_texts import TokenText
from asyncrl.page.sample_index.token_view import COLOURS, TokenView, prompt_tokens, visible

STYLES = (Path(__file__).parents[4] / "asyncrl" / "page" / "static" / "page.css").read_text()


def row(**changes: Any) -> dict[str, Any]:
    """An episode of ten tokens: two turns, an observation between them, and one after them."""
    plain = {
        "step": 7,
        "tokens": list(range(100, 110)),
        "logprobs": [-0.001, -0.3, -9.0, 0.0, 0.0, math.nan, -0.2, -0.2, -0.2, 0.0],
        "trainer_logprobs": [-0.001, -0.6, -9.0, 0.0, 0.0, -0.1, -0.2, -0.2, 2.0, 0.0],
        "advantages": [1.5] * 10,
        "loss_mask": [1, 1, 0, 0, 0, 1, 1, 1, 1, 0],
        "spans": [
            {"version": 4, "step": 5, "start": 0, "stop": 3},
            {"version": 4, "step": 5, "start": 5, "stop": 7},
            {"version": 6, "step": 7, "start": 7, "stop": 9},
        ],
        "turns": [
            {"call": 0, "start": 0, "stop": 3, "finish": "stop", "reward": 0.5},
            {"call": 1 << 30, "start": 5, "stop": 9, "finish": "length", "reward": None},
        ],
        "finish": "stop",
        "resumed_at": 6,
    }
    return plain | changes


def styles(colour: str, **changes: Any) -> list[str]:
    view = TokenView(row(**changes), None)
    return [token.style for part in view.parts(colour, 0, len(view)) for token in part.tokens]


def test_turns_and_observations_are_parts() -> None:
    parts = list(TokenView(row(), None).parts("version", 0, 10))
    assert [(part.kind, [token.position for token in part.tokens]) for part in parts] == [
        ("turn", [0, 1, 2]),
        ("observation", [3, 4]),
        ("turn", [5, 6, 7, 8]),
        ("observation", [9]),
    ]
    assert parts[0].title == "Turn 1: 3 tokens, engine call 0, ended by stop, reward 0.5"
    assert parts[2].title == "Turn 2: 4 tokens, trained text that no engine call wrote, ended by length"
    assert parts[1].tokens[0].title == "token 3, id 103, observation"


def test_a_page_has_only_its_tokens() -> None:
    parts = list(TokenView(row(), None).parts("version", 4, 7))
    assert [[token.position for token in part.tokens] for part in parts] == [[4], [5, 6]]


def test_versions_are_coloured_and_marked_where_they_begin() -> None:
    view = TokenView(row(), None)
    tokens = [token for part in view.parts("version", 0, 10) for token in part.tokens]
    assert [token.style.split()[1:2] for token in tokens if token.use != "observation"] == [["v0"]] * 5 + [["v1"]] * 2
    assert {token.position: token.mark for token in tokens if token.mark} == {0: "v4", 5: "v4", 6: "resumed", 7: "v6"}
    assert view.legend("version") == [("v0", "version 4 (lag 2)"), ("v1", "version 6 (lag 0)")]


def test_colours_follow_the_numbers() -> None:
    assert [each.split()[1] for each in styles("logprob") if each != "t"] == ["s7", "s5", "s0", "missing", *["s5"] * 3]
    assert [each.split()[1] for each in styles("difference") if each != "t"][:4] == ["d4", "d1", "d4", "missing"]
    assert styles("difference")[8] == "t d8"
    assert styles("advantage")[:3] == ["t d7", "t d7", "t missing unused"]
    assert styles("mask")[:4] == ["t v0", "t v0", "t unused", "t"]
    assert styles("advantage", advantages=[0.0] * 10)[0] == "t d4"
    skipped = styles("difference", trainer_logprobs=None, advantages=None)
    assert {each.split()[1] for each in skipped if each != "t"} == {"missing"}


def test_a_title_has_all_numbers() -> None:
    [part] = TokenView(row(), None).parts("version", 1, 2)
    numbers = "engine -0.3000, trainer -0.6000, difference -0.3000, advantage 1.5000"
    assert part.tokens[0].title == f"token 1, id 101, {numbers}, version 4 (lag 2), in the loss"
    assert part.tokens[0].text == "101 ", "without a tokenizer, tokens are shown as ids"


def test_texts_and_kinds_of_tokens_are_shown() -> None:
    texts = [TokenText("a\n"), TokenText("⟨f0⟩", is_part=True), TokenText("<end>", is_special=True)]
    short = row(tokens=[1, 2, 3], loss_mask=[1] * 3, turns=[], spans=[{"version": 1, "step": 1, "start": 0, "stop": 3}])
    [part] = TokenView(short, texts).parts("mask", 0, 3)
    assert [(token.text, token.style) for token in part.tokens] == [
        ("a⏎\n", "t v0"),
        ("⟨f0⟩", "t v0 bytes"),
        ("<end>", "t v0 special"),
    ]
    assert part.title == "Response, ended by stop"
    assert [token.position for token in prompt_tokens([7, 8], None)] == [-2, -1]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b", "a b"),
        ("  ", "··"),
        ("\t\r\n", "⇥\t␍⏎\n"),
        ("\x00\x1b", "␀␛"),
        ("\u202e\u200b", "⟨U+202E⟩⟨U+200B⟩"),
        ("", ""),
    ],
)
def test_special_characters_are_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.parametrize("colour", COLOURS)
def test_every_colour_of_a_legend_is_in_the_style_sheet(colour: str) -> None:
    for name, text in COLOURS[colour].legend(TokenView(row(), None)):
        assert f".{name} {{" in STYLES, text


def luminance(colour: str) -> float:
    digits = colour if len(colour) == 6 else "".join(digit * 2 for digit in colour)
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_text_of_every_colour_has_contrast() -> None:
    found = re.findall(r"\.([vsd]\d) \{ background: #(\w+);(?: color: #(\w+);)? \}", STYLES)
    assert len(found) == 8 + 8 + 9
    for name, background, text in found:
        light, dark = sorted((luminance(background), luminance(text or "111827")), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, name
