"""The content of the last ``\\boxed{}`` of an answer."""

READ_BOXES = ("math", "deepscaler")
"""The built-in rewards that read the last ``\\boxed{}`` themselves, so that the prefix ``boxed_`` changes nothing."""

_BOX = "\\boxed"


def last_boxed(text: str) -> str | None:
    """Return the content of the last ``\\boxed{...}``; None if there is none or its braces do not close."""
    start = text.rfind(_BOX)
    if start < 0 or not text.startswith("{", start + len(_BOX)):
        return None
    depth = 0
    for place in range(start + len(_BOX), len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return text[start + len(_BOX) + 1 : place]
    return None


def without_box(label: str) -> str | None:
    """Return a label without its ``\\boxed{}``; None if its braces do not close."""
    return last_boxed(label) if _BOX in label else label
