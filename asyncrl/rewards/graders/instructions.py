"""The instructions of IFEval (Zhou et al. 2023) by their published ids, each a check of one answer.

A check gets the answer and the instruction's arguments, under their published names.  A missing argument raises
KeyError.  ``prompt`` is the prompt, for the one instruction that repeats it.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.rewards.graders.languages import is_in_language

Check = Callable[[str, Mapping[str, Any]], bool]

AT_LEAST, LESS_THAN = "at least", "less than"
CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""The answers of ``detectable_format:constrained_response``."""

_SENTENCE_END = re.compile(r"[.!?]+[\"')\]\u201d]*(?=\s|$)|\n{2,}")
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|e\.g|i\.e|U\.S|a\.m|p\.m|[B-HJ-Z])\.")
_WORD = re.compile(r"\w+")


def _compared(number: int, relation: str, wanted: int) -> bool:
    if relation not in (AT_LEAST, LESS_THAN):
        raise ValueError(f"the relation must be {AT_LEAST!r} or {LESS_THAN!r}, got {relation!r}")
    return number >= wanted if relation == AT_LEAST else number < wanted


# ---- keywords


def _existence(text: str, given: Mapping[str, Any]) -> bool:
    return all(re.search(word, text, re.IGNORECASE) for word in map(re.escape, given["keywords"]))


def _frequency(text: str, given: Mapping[str, Any]) -> bool:
    found = re.findall(re.escape(given["keyword"]), text, re.IGNORECASE)
    return _compared(len(found), given["relation"], given["frequency"])


def _forbidden(text: str, given: Mapping[str, Any]) -> bool:
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in map(re.escape, given["forbidden_words"]))


def _letters(text: str, given: Mapping[str, Any]) -> bool:
    return _compared(Counter(text.lower())[given["letter"].lower()], given["let_relation"], given["let_frequency"])


# ---- language, case and punctuation


def _language(text: str, given: Mapping[str, Any]) -> bool:
    return is_in_language(text, given["language"])


def _capital_words(text: str, given: Mapping[str, Any]) -> bool:
    capital = [word for word in re.findall(r"[\w'\u2019-]+", text) if word.isupper()]
    return _compared(len(capital), given["capital_relation"], given["capital_frequency"])


def _all_capital(text: str, given: Mapping[str, Any]) -> bool:
    return text.isupper() and is_in_language(text, "en")


def _all_lower(text: str, given: Mapping[str, Any]) -> bool:
    return text.islower() and is_in_language(text, "en")


def _no_comma(text: str, given: Mapping[str, Any]) -> bool:
    return "," not in text


# ---- lengths


def _sentences(text: str, given: Mapping[str, Any]) -> bool:
    plain = _ABBREVIATION.sub(lambda found: found[0].replace(".", ""), text)
    number = sum(bool(_WORD.search(piece)) for piece in _SENTENCE_END.split(plain))
    return _compared(number, given["relation"], given["num_sentences"])


def _paragraphs(text: str, given: Mapping[str, Any]) -> bool:
    """Paragraphs are separated by ``***``; an empty one counts only at the ends, where it is left out."""
    pieces = [piece.strip() for piece in re.split(r"\s?\*\*\*\s?", text)]
    inner = pieces[1:-1]
    number = len(inner) + sum(bool(piece) for piece in {0: pieces[0], len(pieces) - 1: pieces[-1]}.values())
    return all(inner) and number == int(given["num_paragraphs"])


def _words(text: str, given: Mapping[str, Any]) -> bool:
    return _compared(len(_WORD.findall(text)), given["relation"], given["num_words"])


def _nth_paragraph(text: str, given: Mapping[str, Any]) -> bool:
    """Paragraphs are separated by empty lines; the first word of the nth one is given."""
    pieces, nth = re.split(r"\n\n", text), given["nth_paragraph"]
    number = sum(bool(piece.strip()) for piece in pieces)
    if not 0 < nth <= len(pieces) or not pieces[nth - 1].strip():
        return False
    first = pieces[nth - 1].split()[0].lstrip("'\"")
    word = re.split(r"[.,?!'\"]", first)[0].lower()
    return number == int(given["num_paragraphs"]) and word == str(given["first_word"]).lower()


# ---- content


def _placeholders(text: str, given: Mapping[str, Any]) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= int(given["num_placeholders"])


def _postscript(text: str, given: Mapping[str, Any]) -> bool:
    marker = given["postscript_marker"].strip()
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    pattern = patterns.get(marker, re.escape(marker.lower()))
    return re.search(pattern, text.lower()) is not None


# ---- format


def _bullets(text: str, given: Mapping[str, Any]) -> bool:
    stars = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^\s*-.*$", text, re.MULTILINE)
    return len(stars) + len(dashes) == int(given["num_bullets"])


def _constrained(text: str, given: Mapping[str, Any]) -> bool:
    return any(answer in text for answer in CONSTRAINED)


def _highlights(text: str, given: Mapping[str, Any]) -> bool:
    single = [part for part in re.findall(r"\*[^\n\*]*\*", text) if part.strip("*").strip()]
    double = [part for part in re.findall(r"\*\*[^\n\*]*\*\*", text) if part[2:-2].strip()]
    return len(single) + len(double) >= int(given["num_highlights"])


def _sections(text: str, given: Mapping[str, Any]) -> bool:
    splitter = re.escape(given["section_spliter"].strip())
    return len(re.split(rf"\s?{splitter}\s?\d+\s?", text)) - 1 >= int(given["num_sections"])


def _json(text: str, given: Mapping[str, Any]) -> bool:
    body = text.strip()
    for opening in ("```json", "```Json", "```JSON", "```"):
        body = body.removeprefix(opening)
    try:
        json.loads(body.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str, given: Mapping[str, Any]) -> bool:
    return any(title.strip("<> ") for title in re.findall(r"<<[^\n]+>>", text))


# ---- combinations, beginning and end


def _two_responses(text: str, given: Mapping[str, Any]) -> bool:
    pieces = text.split("******")
    inner = pieces[1:-1]
    valid = [piece.strip() for piece in pieces if piece.strip()]
    return all(piece.strip() for piece in inner) and len(valid) == 2 and valid[0] != valid[1]


def _repeats_prompt(text: str, given: Mapping[str, Any]) -> bool:
    prompt = given.get("prompt_to_repeat") or given["prompt"]
    if not prompt:
        raise KeyError("prompt_to_repeat")
    return text.strip().lower().startswith(str(prompt).strip().lower())


def _ends_with(text: str, given: Mapping[str, Any]) -> bool:
    phrase = str(given["end_phrase"]).strip().lower()
    return text.strip().strip('"').lower().endswith(phrase)


def _quoted(text: str, given: Mapping[str, Any]) -> bool:
    body = text.strip()
    return len(body) > 1 and body[0] == body[-1] == '"'


INSTRUCTIONS: Mapping[str, Check] = {
    "keywords:existence": _existence,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letters,
    "language:response_language": _language,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": _words,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeats_prompt,
    "startend:end_checker": _ends_with,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": _all_capital,
    "change_case:english_lowercase": _all_lower,
    "punctuation:no_comma": _no_comma,
    "startend:quotation": _quoted,
}
"""The 25 instructions of the published set."""
