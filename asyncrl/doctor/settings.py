"""The translation of a training command's flags into settings of asyncrl, flag by flag."""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from asyncrl.config.areas import Secret
from asyncrl.config.command_line import LAST_COUNTS
from asyncrl.config.flag_status import status_of
from asyncrl.config.knobs import Knob, knobs, nearest
from asyncrl.config.passthrough import passed_through
from asyncrl.config.secret_names import is_secret
from asyncrl.config.slime.accepted import is_same
from asyncrl.config.slime.status import FlagStatus, Kind
from asyncrl.config.slime.table import TABLE
from asyncrl.config.values import WrongValue, from_flag, shown
from asyncrl.doctor.launch import Flag
from asyncrl.doctor.words import Text

MASK = "***"
"""The text that stands for a secret."""


class Verdict(StrEnum):
    """The verdict on one flag."""

    SET = "set"
    """A line of the TOML."""
    TRUE_ANYWAY = "true anyway"
    """No line: the run does this already."""
    DIFFERENT = "different"
    """Works in another way than in slime."""
    MISSING = "missing"
    """asyncrl has no such flag, or not with this value."""
    UNKNOWN_VALUE = "unknown value"
    """The value is unknown without running the script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The verdict on one flag, with its reason."""

    flag: Flag
    verdict: Verdict
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class Translation:
    """A training command in asyncrl's terms."""

    lines: dict[str, str] = field(default_factory=dict)
    """TOML values by key, in the order of the flags."""
    comments: dict[str, str] = field(default_factory=dict)
    """A remark behind the TOML line of a key; for a key without a line, the line is left to the reader."""
    placeholders: dict[str, str] = field(default_factory=dict)
    """TOML values for the check of the settings alone: values with unknown parts, and flags that are true anyway."""
    findings: list[Finding] = field(default_factory=list)

    def of(self, verdict: Verdict) -> list[Finding]:
        """Return all findings with this verdict."""
        return [finding for finding in self.findings if finding.verdict is verdict]


def translate(program: str, flags: Sequence[Flag]) -> Translation:
    """Translate the flags of ``program``; of a repeated flag, the last one counts, as in slime."""
    found = Translation()
    for flag in _last_ones([_masked(flag) for flag in flags], found):
        status = status_of(flag.name)
        if re.fullmatch(r"[A-Za-z0-9_-]+", flag.name) is None:
            reason = "no flag has such a name; it may depend on a variable or a command, and is left out"
            found.findings.append(Finding(flag=flag, verdict=Verdict.UNKNOWN_VALUE, reason=reason))
        elif status is None:
            guess = nearest(flag.name, knobs())
            reason = "neither asyncrl nor slime's scripts have such a flag" + (
                f"; did you mean --{guess}?" if guess else ""
            )
            found.findings.append(Finding(flag=flag, verdict=Verdict.MISSING, reason=reason))
        else:
            found.findings.append(_finding(flag, status, found))
    if program == "train.py" and "max-staleness" not in found.lines:
        found.lines["max-staleness"] = "0"
        found.comments["max-staleness"] = "train.py is synchronous"
    return found


def _masked(flag: Flag) -> Flag:
    """Return the flag without its words if they are secret."""
    if not _is_secret(flag.name):
        return flag
    return replace(flag, values=tuple(replace(value, value=MASK) for value in flag.values))


def _is_secret(name: str) -> bool:
    """Whether the value of a setting, or of a flag of SGLang or its router, is secret."""
    knob = knobs().get(name)
    return passed_through(name) is not None and is_secret(name) if knob is None else knob.type is Secret


def _last_ones(flags: Sequence[Flag], found: Translation) -> Iterable[Flag]:
    last = {flag.name: flag for flag in flags}
    for flag in flags:
        if last[flag.name] is flag:
            yield flag
        elif flag.values != last[flag.name].values:
            reason = f"given again later as {last[flag.name].written}, which counts in slime{_addition(flag.name)}"
            found.findings.append(Finding(flag=flag, verdict=Verdict.DIFFERENT, reason=reason))


def _addition(name: str) -> str:
    knob = knobs().get(name)
    joins = knob is not None and knob.is_many and name not in LAST_COUNTS
    return "; train_async.py would add the words of both" if joins else ""


def _finding(flag: Flag, status: FlagStatus, found: Translation) -> Finding:
    if status.kind is Kind.NOT_HERE:
        return Finding(flag=flag, verdict=Verdict.MISSING, reason=status.text)
    if unknown := _unknown(flag.values):
        return _left_open(flag, status, unknown, found)
    if status.setting is not None or status.kind is Kind.DONE:
        return _setting(flag, status, found)
    found.placeholders[flag.name] = _foreign(flag)
    if status.kind is Kind.DIFFERENT:
        return Finding(flag=flag, verdict=Verdict.DIFFERENT, reason=status.text)
    value = " ".join(value.value for value in flag.values)
    if status.accepted and not any(is_same(value, one) for one in status.accepted):
        reason = f"{status.text}; only {' or '.join(status.accepted)} is possible"
        del found.placeholders[flag.name]
        return Finding(flag=flag, verdict=Verdict.MISSING, reason=reason)
    reason = f"{status.text}; compared at the start" if status.is_compared else status.text
    if status.is_compared:
        found.lines[flag.name] = _foreign(flag)
    return Finding(flag=flag, verdict=Verdict.TRUE_ANYWAY, reason=reason)


def _left_open(flag: Flag, status: FlagStatus, unknown: str, found: Translation) -> Finding:
    if status.setting is None and status.kind is not Kind.DONE:
        return Finding(flag=flag, verdict=Verdict.TRUE_ANYWAY, reason=f"{status.text}; not compared, because {unknown}")
    name = status.setting or flag.name
    found.comments[name] = f"{flag.written}: {unknown}"
    if (knob := knobs().get(name)) is not None:
        with suppress(WrongValue):
            found.placeholders[name] = _value(knob, flag.name, [value.value for value in flag.values])
    return Finding(flag=flag, verdict=Verdict.UNKNOWN_VALUE, reason=unknown)


def _unknown(values: Sequence[Text]) -> str:
    unset = dict.fromkeys(name for value in values for name in value.unset)
    sources = dict.fromkeys(source for value in values for source in value.unknown)
    lines = [f"the script does not set {name}; give --env {name}=VALUE" for name in unset]
    return "; ".join([*lines, *(f"{source} is not run" for source in sources)])


def _setting(flag: Flag, status: FlagStatus, found: Translation) -> Finding:
    name = status.setting or flag.name
    knob = knobs().get(name)
    words = [value.value for value in flag.values]
    try:
        written = _foreign(flag) if knob is None else _value(knob, flag.name, words)
    except WrongValue as error:
        return Finding(flag=flag, verdict=Verdict.MISSING, reason=f"the value {error}")
    if _is_secret(name):
        found.comments[name] = "secret, and not written; give it to the run in another way (docs/metrics.md)"
    else:
        found.lines[name] = written
    is_different = status.kind is Kind.DIFFERENT and not _is_about_default(status)
    verdict = Verdict.DIFFERENT if is_different else Verdict.SET
    return Finding(flag=flag, verdict=verdict, reason=status.text)


def other_defaults(found: Translation) -> list[str]:
    """Return one line for each setting that the script leaves out, and whose default is not slime's."""
    given = {finding.flag.name.removeprefix("no-") for finding in found.findings}
    rows = (row for row in TABLE.values() if row.kind is Kind.DIFFERENT and row.setting is not None)
    return [f"--{row.name}: {row.text}" for row in rows if _is_about_default(row) and row.name not in given]


def _is_about_default(status: FlagStatus) -> bool:
    """Whether a setting differs only in its default."""
    return status.setting is not None and "default" in status.text


def _value(knob: Knob, given: str, words: Sequence[str]) -> str:
    """Return the TOML value of a setting.  Raises WrongValue."""
    if knob.type is bool:
        if words:
            raise WrongValue(f"must be left out, got {shown(' '.join(words))}")
        return shown(given == knob.name or not given.startswith("no-"))
    if not knob.is_many and len(words) != 1:
        raise WrongValue(f"must be one word, got {len(words)}")
    value = from_flag(knob, list(words) if knob.is_many else words[0], Path.cwd())
    if knob.type in (int, float):
        return shown(value)
    return shown(list(words) if knob.is_many else words[0])


def _foreign(flag: Flag) -> str:
    """Return the TOML value of a flag that is not a setting of asyncrl."""
    words = [value.value for value in flag.values]
    return shown(True) if not words else shown(words[0]) if len(words) == 1 else shown(words)


def as_toml(found: Translation, head: Sequence[str]) -> str:
    """Return the text of a TOML file; ``head`` becomes comments at its top."""
    lines = [*(f"# {line}" for line in head), ""]
    comments = {name: " ".join(text.split()) for name, text in found.comments.items()}
    for name, value in found.lines.items():
        comment = comments.get(name)
        lines.append(f"{name} = {value}" + (f"  # {comment}" if comment else ""))
    lines += [f"# {name} = ?  # {text}" for name, text in comments.items() if name not in found.lines]
    return "\n".join(lines) + "\n"


def variables(text: Text, environment: Mapping[str, Text]) -> str:
    """Return a text with the variables of a training command's environment filled in."""
    value = text.value
    for name, given in environment.items():
        value = value.replace(f"${{{name}}}", given.value)
    return value
