"""One spelling for one answer: LaTeX markup, units, currency and thousands separators that do not change its value."""

import re
from decimal import Decimal

_GROUP = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
"""A group in braces, with one level of groups inside."""
_UNITS = (
    "degree|centimeter|cm|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard|km|kilometer|kg|dollar"
)
_UNIT = re.compile(rf"(?<=[\d.)}}\s])\s*(?:square\s+|cubic\s+|sq\.?\s*)?(?:{_UNITS})(?:e?s)?\b\.?\s*(?:\^\{{?\d\}}?)?")
_TEXT_UNIT = re.compile(
    r"(?<=[\d)}])(?:\\[ ,;:!]|~|\s)*\\(?:text|mathrm|mbox|rm)\{\s*[a-zA-Z][^{}]*\}\s*(?:\^\{?\d\}?)?$"
)
_SPACES = re.compile(r"\s+")
_NUMBER_WORDS = {"trillion": 12, "billion": 9, "million": 6}
_COMMAS = re.compile(r"(?<=\d)(?:,|\{,\}|,\\!|\\,)(?=\d{3}(?!\d))")
"""Thousands separators, and commas that may as well separate the elements of a list."""
_THOUSANDS = re.compile(r"(?<=\d)(?:,(?=0)|\{,\}|,\\!|\\,)(?=\d{3}(?!\d))")
"""Thousands separators alone: no element of a list begins with a superfluous 0."""
_SIMPLE: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\\(?:left|right|big|Big|bigl|bigr|displaystyle|limits)(?![a-zA-Z])\s*"), ""),
    (re.compile(r"\\[dt](frac|binom)"), r"\\\1"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°"), ""),
    (re.compile(r"\\?[$%]|[€£]"), ""),
    (re.compile(r"\\[!;:, ]|\\quad|\\qquad|~|\u00a0"), " "),
    (re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*" + _GROUP), r"\1"),
    (re.compile(r"\\(?:cdot|times)(?![a-zA-Z])|[\u00b7\u00d7]"), "*"),
    (re.compile(r"\\(?:leq|le)(?![a-zA-Z])|\u2264"), "<="),
    (re.compile(r"\\(?:geq|ge)(?![a-zA-Z])|\u2265"), ">="),
    (re.compile(r"[\u2212\u2013]"), "-"),
    (re.compile(r"\\pi(?![a-zA-Z])|\u03c0"), "pi"),
    (re.compile(r"\\infty(?![a-zA-Z])|\u221e"), "inf"),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\overline\s*\{([a-zA-Z]+)\}"), r"\1"),
    (re.compile(r"\\cup(?![a-zA-Z])|\u222a"), "U"),
    (re.compile(r"\\([{}])"), r"\1"),
)
_FRACTION_SHORT = re.compile(
    r"\\frac\s*([^{\s\\])\s*([^{\s\\])|\\frac\s*" + _GROUP + r"\s*([^{\s])|\\frac\s*([^{\s])\s*" + _GROUP
)
_FRACTION = re.compile(r"\\frac\s*" + _GROUP + r"\s*" + _GROUP)
_ROOT = re.compile(r"(?:\\sqrt|\u221a)\s*(?:" + _GROUP + r"|(\w))")
_MIXED = re.compile(r"(?<![\w.)])(\d+)\s+(\d+/\d+)")
_NAME = re.compile(r"^\s*\w{1,2}\s*=(?!=)(?=[^=<>]*$)")


def spelled(answer: str, *, is_list: bool = False) -> str:
    """Return the answer in one spelling: lower case, without spaces, markup, units and thousands separators.

    The comma of ``100,200`` counts as a thousands separator, or with ``is_list`` as one between two elements.
    """
    text = _TEXT_UNIT.sub("", _SPACES.sub(" ", answer).strip().rstrip(".").strip())
    text = (_THOUSANDS if is_list else _COMMAS).sub("", text)
    for pattern, new in _SIMPLE:
        text = pattern.sub(new, text)
    text = _SPACES.sub(" ", text)  # a long run of spaces would take the patterns below quadratic time
    text = re.sub(r"\s+(?:or|and)\s+", " , ", text)
    for word, power in _NUMBER_WORDS.items():
        text = re.sub(rf"\s*{word}", f"*10^{power}", text)
    text = _UNIT.sub("", text)
    text = _without_commands(text)
    text = _NAME.sub("", text)
    text = _MIXED.sub(r"\1+\2", _decimals(text)).lower()
    text = re.sub(r"\s+", "", text)
    return text[1:-1] if re.fullmatch(r"\{[^{},]*\}", text) and "\\" not in text else text


def _without_commands(text: str) -> str:
    """Write fractions as ``a/b`` and roots as ``sqrt(a)``, innermost first."""
    for _ in range(8):
        before = text
        text = _FRACTION_SHORT.sub(_long_fraction, text)
        text = _FRACTION.sub(lambda found: f" {_operand(found[1])}/{_operand(found[2])}", text)
        text = _ROOT.sub(lambda found: f"sqrt({found[1] or found[2]})", text)
        if text == before:
            break
    return text


def _long_fraction(found: re.Match[str]) -> str:
    top, bottom = [group for group in found.groups() if group is not None]
    return f"\\frac{{{top}}}{{{bottom}}}"


def _operand(text: str) -> str:
    text = text.strip()
    return text if re.fullmatch(r"[\w.]+|sqrt\(\w+\)", text) else f"({text})"


def _decimals(text: str) -> str:
    """Write ``.5`` as ``0.5`` and ``3.00`` as ``3``."""
    text = re.sub(r"(?<![\w.^])\d+(?:\.\d+)?[eE][+-]?\d{1,2}(?![\w.])", _expanded, text)
    text = re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)
    return re.sub(r"(?<![\w.])(\d+)\.0+(?![\d.])", r"\1", text)


def _expanded(found: re.Match[str]) -> str:
    """Write ``1.5e3`` as ``1500``, and ``1e-3`` as ``0.001``."""
    return f"{Decimal(found[0]):f}"
