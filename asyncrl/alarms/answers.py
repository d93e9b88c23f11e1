"""Rules about answers: their lengths, their texts, and the prompts that they answer.

The numbers that begin with ``texts/`` are those of ``texts.py``; they exist for steps whose samples were read.
"""

from asyncrl.alarms.history import History
from asyncrl.alarms.rule import Rule

TRUNCATED = 0.9
"""Share of answers that are cut at the length limit; healthy runs of the quickstart have at most 0.21."""
REPEATED = 0.3
"""Share of answers that end in repetitions; healthy runs of the quickstart have none."""
GARBAGE = 0.02
"""Share of characters that no text has."""
BEGIN_TURN = 0.5
"""Share of answers that begin with the name of a role or the marker before it."""
EMPTY = 0.5
"""Share of empty answers."""
ALIKE = 0.95
"""Share of groups whose answers are all equal; healthy runs of the quickstart reach 0.75, with a reward of 0.95."""
SHIFTED = 1.2
"""``prompts/surprise_ratio`` at which wrong ids are clearly more probable than the prompts.

The quickstart has 0.6 to 0.8, the mixture 0.93 to 1.0: these models were never taught their prompts.  With a shifted
tokenizer it is 1.4 to 1.5, because one of the wrong readings is the right one.  Training on answers may raise the
ratio, so the smallest one of a run counts.
"""
ACCEPTED = 0.05
"""Share of groups that the filter keeps; a healthy run with a filter of easy and hard prompts came down to 0.07."""


def shifted(history: History) -> str | None:
    """Whether the model finds prompts of wrong ids more probable than the prompts."""
    ratio, (least, _) = history.values("prompts/surprise_ratio")[-1], history.bounds("prompts/surprise_ratio")
    if least < SHIFTED:
        return None
    return (
        "The model finds prompts more probable if all their ids are off by one: the negative log-prob of the prompts "
        f"is {ratio:.2f} times as large."
    )


def biased(history: History) -> str | None:
    """Whether the lengths of trained answers are biased."""
    if not history.now("length/alarm"):
        return None
    ratio = history.now("length/ratio") or 1.0
    return f"Trained answers have {ratio:.0%} of the length that they would have if none were lost."


def endless(history: History) -> str | None:
    """Whether most answers are cut at the limit."""
    share = history.now("response/truncated")
    return (
        f"{share:.0%} of the answers reach the length limit before they end." if share and share >= TRUNCATED else None
    )


def filtered(history: History) -> str | None:
    """Whether the filter drops nearly all groups."""
    share = history.now("filter/acceptance")
    return f"The filter keeps {share:.0%} of the groups." if share is not None and share < ACCEPTED else None


def repeated(history: History) -> str | None:
    """Whether many answers end in repetitions."""
    share = history.now("texts/repeated")
    return f"{share:.0%} of the answers repeat one piece until their end." if share and share >= REPEATED else None


def garbage(history: History) -> str | None:
    """Whether answers have characters that no text has."""
    share = history.now("texts/garbage")
    return f"{share:.1%} of the characters are broken or unprintable." if share and share >= GARBAGE else None


def empty(history: History) -> str | None:
    """Whether most answers are empty."""
    share = history.now("texts/empty")
    return f"{share:.0%} of the answers are empty." if share and share >= EMPTY else None


def turn_begins(history: History) -> str | None:
    """Whether answers begin with what the chat template should have written."""
    share = history.now("texts/begin_turn")
    if not share or share < BEGIN_TURN:
        return None
    return f"{share:.0%} of the answers begin with the name of a role: prompts lack the beginning of the answer."


def alike(history: History) -> str | None:
    """Whether the answers of nearly every group are equal."""
    share = history.now("texts/alike")
    return f"In {share:.0%} of the groups, all answers are equal." if share and share >= ALIKE else None


RULES = (
    Rule(
        title="Token ids are shifted",
        needs=("prompts/surprise_ratio",),
        sign=shifted,
        lasts=2,
        look="Check that the tokenizer belongs to this model, with the same added tokens.",
    ),
    Rule(
        title="Lengths are biased",
        needs=("length/alarm",),
        reads=("length/ratio",),
        sign=biased,
        look="Raise --max-staleness, use --stale-policy wait, or look why answers fail (groups/stale, groups/failed).",
    ),
    Rule(
        title="Answers do not end",
        needs=("response/truncated",),
        sign=endless,
        lasts=3,
        look="Look at some answers: the end token, the chat template, or --rollout-max-response-len may be wrong.",
    ),
    Rule(
        title="Most groups are filtered",
        needs=("filter/acceptance",),
        sign=filtered,
        lasts=3,
        look="Prompts are too easy or too hard, or rewards do not vary; filter/REASON has the reasons.",
    ),
    Rule(
        title="Repeated text",
        needs=("texts/repeated",),
        sign=repeated,
        lasts=2,
        look="Look at these answers. Lower the learning rate, or check the end token and the chat template.",
    ),
    Rule(
        title="Garbage text",
        needs=("texts/garbage",),
        sign=garbage,
        lasts=2,
        look="Look at these answers. Check the tokenizer, the chat template and the checkpoint of the engines.",
    ),
    Rule(
        title="Empty answers",
        needs=("texts/empty",),
        sign=empty,
        lasts=2,
        look="The model ends at once: check the chat template and the end tokens.",
    ),
    Rule(
        title="Answers begin with a role",
        needs=("texts/begin_turn",),
        sign=turn_begins,
        lasts=2,
        look="Check the chat template: it must add the generation prompt.",
    ),
    Rule(
        title="All answers are alike",
        needs=("texts/alike",),
        sign=alike,
        lasts=2,
        look="The policy explores hardly anything. Check --rollout-temperature and the entropy.",
    ),
)
