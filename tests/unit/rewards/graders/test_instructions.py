"""Every published IFEval instruction, on an answer that follows it and on one that does not."""

from typing import Any

import pytest

from asyncrl.errors import RewardFailed
from asyncrl.rewards.graders import GRADERS
from asyncrl.rewards.graders.instructions import INSTRUCTIONS

ENGLISH = "the quick brown fox jumps over the lazy dog and then it runs back home to its family"
GERMAN = "Der schnelle braune Fuchs springt über den faulen Hund und läuft danach nach Hause"

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["rain", "sun"]}, "Sun after Rain.", "Only sun."),
    ("keywords:frequency", {"keyword": "ha", "relation": "at least", "frequency": 3}, "Ha ha ha", "ha ha"),
    ("keywords:forbidden_words", {"forbidden_words": ["bad"]}, "badly", "a BAD idea"),
    (
        "keywords:letter_frequency",
        {"letter": "e", "let_relation": "less than", "let_frequency": 2},
        "An apple",
        "Eel",
    ),
    ("language:response_language", {"language": "de"}, GERMAN, ENGLISH),
    (
        "length_constraints:number_sentences",
        {"relation": "less than", "num_sentences": 3},
        "Dr. No came. He left!",
        "It rained. He left. She ran.",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo\n***\n", "one\n\ntwo"),
    ("length_constraints:number_words", {"relation": "at least", "num_words": 3}, "one two-three", "one two"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        "First.\n\n'then, it rained.",
        "Then it rained.\n\nFirst.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] of [city]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP. P.S one more", "Bye. P.S. one"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", "* one\n* two\n* three"),
    ("detectable_format:constrained_response", {}, "My answer is maybe. So.", "my answer: maybe"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1 a\nSECTION 2 b",
        "SECTION 1 a\nSECTION b",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', '{"a": [1}'),
    ("detectable_format:title", {}, "<<On rain>>\nIt falls.", "<< >>"),
    ("combination:two_responses", {}, "one******two", "one******one"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "say hi. Hi!", "Hi! Say hi."),
    ("startend:end_checker", {"end_phrase": "That is all."}, 'Well. that is all."', "That is all. Bye"),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "at least", "capital_frequency": 2},
        "NASA and ESA agree",
        "NASA agrees",
    ),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH),
    ("change_case:english_lowercase", {}, ENGLISH, ENGLISH.title()),
    ("punctuation:no_comma", {}, "no, not".replace(",", ""), "no, not"),
    ("startend:quotation", {}, '"quoted"', '"quoted'),
]


def graded(response: str, *ids: str, kwargs: Any = None, **metadata: Any) -> Any:
    return GRADERS["ifeval"](response, None, {"instruction_id_list": list(ids), "kwargs": kwargs, **metadata})


def test_every_instruction_has_a_case() -> None:
    assert sorted(name for name, *_ in CASES) == sorted(INSTRUCTIONS)


@pytest.mark.parametrize(("name", "kwargs", "right", "wrong"), CASES, ids=[name for name, *_ in CASES])
def test_an_instruction(name: str, kwargs: dict[str, Any], right: str, wrong: str) -> None:
    unused = {"num_of_nothing": None}
    assert graded(right, name, kwargs=[kwargs | unused]) == 1.0
    assert graded(wrong, name, kwargs=[kwargs | unused]) == 0.0


def test_all_instructions_must_be_followed() -> None:
    both = ("punctuation:no_comma", "keywords:existence")
    assert graded("sun", *both, kwargs=[{}, {"keywords": ["sun"]}]) == 1.0
    assert graded("sun, rain", *both, kwargs=[{}, {"keywords": ["sun"]}]) == 0.0
    assert graded("sun", *both, kwargs={"keywords": ["sun"]}) == 1.0
    assert graded(" ", "punctuation:no_comma") == 0.0


def test_the_prompt_to_repeat_may_be_the_row_s_prompt() -> None:
    assert graded("Say hi. Hi!", "combination:repeat_prompt", prompt_text="Say hi.") == 1.0


@pytest.mark.parametrize(
    ("ids", "line"),
    [
        ((), "the row's metadata has no instruction_id_list"),
        (("keywords:existance",), "unknown instruction 'keywords:existance'; the known ones are change_case:"),
        (("keywords:existence",), "the instruction keywords:existence needs 'keywords' in the row's kwargs"),
        (("combination:repeat_prompt",), "the instruction combination:repeat_prompt needs 'prompt_to_repeat'"),
    ],
)
def test_a_row_that_cannot_be_graded_is_one_line(ids: tuple[str, ...], line: str) -> None:
    with pytest.raises(RewardFailed) as error:
        graded("text", *ids)
    assert str(error.value).startswith(line)
