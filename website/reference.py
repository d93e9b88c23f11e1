"""The pages of *Reference*, made from the code each time the site is built."""

from collections.abc import Iterable, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from asyncrl.commands.main import COMMANDS, benchmarks, usage
from asyncrl.config.areas import Secret
from asyncrl.config.command_line import FIRST, LAST_COUNTS
from asyncrl.config.eval_file import KEYS
from asyncrl.config.knobs import ALIASES, AREAS, Knob, knobs
from asyncrl.doctor.__main__ import parser as doctor_parser
from asyncrl.engines.megatron.weights.convert_flags import parser as convert_parser
from asyncrl.journal.__main__ import parser as journal_parser
from asyncrl.metrics.names import METRICS, Metric
from asyncrl.rollout_log.files import schema

_KINDS = {int: "whole number", float: "number", str: "text", Path: "path", Secret: "text, kept secret"}

# ---- flags


def flags_page() -> str:
    """Return the page of all flags, by area."""
    first = [knobs()[name] for name in FIRST]
    areas = [line for area, cls in AREAS.items() for line in _area(area, cls.__doc__ or "")]
    return "\n".join((_FLAGS, "## The flags that matter most", "", *_flag_table(first), "", *areas))


_FLAGS = """# Flags

This page is for people who look up a flag. It lists every flag of a run: of `train_async.py`, `train.py` and
`asyncrl train`. Each flag is also a key of the TOML file, without the dashes. The [page about runs](../running.md)
explains the important ones. Flags of slime and Megatron without a setting here are in [the table of
slime's flags](../slime.md#the-table-of-flags). Any `--sglang-FLAG` goes to the SGLang server, and any `--router-FLAG`
to sglang-router.
"""


def _area(area: str, title: str) -> list[str]:
    mine = [knob for knob in knobs().values() if knob.area == area]
    return [f"## {title.splitlines()[0].removesuffix('.')}", "", *_flag_table(mine), ""]


def _flag_table(mine: Iterable[Knob]) -> list[str]:
    return _table(("flag", "value", "default", "meaning"), (_flag_row(knob) for knob in mine))


def _flag_row(knob: Knob) -> tuple[str, ...]:
    others = [alias for alias, name in ALIASES.items() if name == knob.name]
    negated = [f"no-{knob.name}"] if knob.type is bool else []
    names = "<br>".join(f"`--{name}`" for name in (knob.name, *others, *negated))
    return names, _kind(knob), _default(knob.default), _escaped(knob.help)


def _kind(knob: Knob) -> str:
    if knob.choices:
        return ", ".join(f"`{choice}`" for choice in knob.choices)
    if knob.type is bool:
        return "on or off"
    kind = _KINDS[knob.type]
    if not knob.is_many:
        return kind
    return f"one or more: {kind}" + ("" if knob.name in LAST_COUNTS else "; a repeated flag adds")


def _default(value: Any) -> str:
    if value is MISSING:
        return "required"
    if value is None or value == () or value == "":
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    words = value if isinstance(value, tuple) else (value,)
    return f"`{' '.join(map(str, words))}`"


# ---- metrics


def metrics_page() -> str:
    """Return the page of all metrics, by the first part of their names."""
    families: dict[str, list[Metric]] = {}
    for metric in METRICS:
        family, slash, _ = metric.name.partition("/")
        families.setdefault(family if slash else "other numbers", []).append(metric)
    return "\n".join((_METRICS, *(line for name, mine in families.items() for line in _family(name, mine))))


_METRICS = """# All metrics

This page is for people who look up a number of `metrics.jsonl`, TensorBoard or a tracker. Capitals in a name stand for
any text: `filter/REASON`. The [page about metrics](../metrics.md) tells which number to look at for which question. A
number that does not exist for a step is left out of its row.
"""


def _family(name: str, mine: Iterable[Metric]) -> list[str]:
    rows = ((f"`{each.name}`", each.unit or "-", _escaped(each.meaning)) for each in mine)
    return [f"## {name}", "", *_table(("name", "unit", "meaning"), rows), ""]


# ---- files


def files_page() -> str:
    """Return the page of file formats: links, and the tables that the code has."""
    columns = ((f"`{f.name}`", f"`{f.type}`", f.metadata[b"comment"].decode()) for f in schema())
    keys = ((f"`{key}`", f"`--{name}`", _escaped(knobs()[name].help)) for key, name in KEYS.items())
    return "\n".join(
        (
            _FILES,
            *_table(("column", "type", "meaning"), columns),
            "",
            _EVAL_KEYS,
            *_table(("key of a set", "flag", "meaning"), keys),
            "",
        )
    )


_FILES = """# File formats

This page is for people who write or read files of a run with programs of their own.

| file | format | described in |
|---|---|---|
| prompts, training and held-out | JSONL or Parquet | [prompt files](../data.md) |
| settings of a run | TOML; keys are names of [flags](flags.md) | [running](../running.md#start-a-run) |
| sets of held-out prompts | YAML or TOML | [below](#sets-of-held-out-prompts) |
| `metrics.jsonl` | one JSON object per step, with the [metrics](metrics.md) as keys | [metrics](../metrics.md) |
| `rollouts/step-NUMBER.parquet` | Parquet, one row per sample | [below](#columns-of-rollouts) |
| `journal/segment-NUMBER.journal` | records in JSON and raw columns | [the journal](../journal.md#the-format) |
| `timeline.json` | Trace Event Format, for Perfetto | [the run directory](../running.md#the-run-directory) |
| `quarantine.jsonl` | one JSON object per failure | [rows that keep failing](../data.md#rows-that-keep-failing) |
| checkpoints | Megatron's `torch_dist`, with a JSON file for the run | [checkpoints](../checkpoints.md#files) |
| `model/` | Hugging Face | [models](../models.md#weights-in-and-out) |
| calibration of the simulator | TOML | [the simulator](../simulator.md#calibration) |

## Columns of rollouts

Each row is one sample. Lists of tokens have one entry for each token of the response. [The samples of a
run](../rollouts.md) has examples.
"""
_EVAL_KEYS = """## Sets of held-out prompts

`--eval-config` names a file of sets. Each set has a `name` and a `path`; the other keys replace a flag for this set.
[Evaluation](../evaluation.md#settings-of-each-set) has examples.
"""

# ---- commands


def commands_page() -> str:
    """Return the page of all commands, with the help of those other than runs."""
    parsers = {
        "journal": journal_parser(),
        "doctor": doctor_parser(),
        "convert": convert_parser("Convert weights between formats.", ()),
    }
    lines = [_COMMANDS, *_fenced(usage())]
    for name, parser in parsers.items():
        parser.prog = f"asyncrl {name}"
        lines += [
            f"## asyncrl {name}",
            "",
            f"The command can {COMMANDS[name].summary}.",
            "",
            *_fenced(parser.format_help()),
        ]
    rows = ((f"`asyncrl bench {name}`", _escaped(summary)) for name, summary in benchmarks().items())
    return "\n".join((*lines, _BENCH, *_table(("command", "what it does"), rows), ""))


_COMMANDS = """# Commands

This page is for people who look up a command. In a checkout, write `uv run` in front of each. `python train_async.py`
is `asyncrl train`; [flags](flags.md) lists its flags.
"""
_BENCH = """## asyncrl bench

Benchmarks are part of the repository, not of an installed package. [Benchmarks](../results/benchmarks.md) describes
them. `asyncrl simulate` is `asyncrl bench simulate`.
"""

# ---- tables


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = (head, ["---"] * len(head), *rows)
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _escaped(text: str) -> str:
    """Return plain text such that Markdown shows it as it is, with flags as code."""
    plain = text.replace("&", "&amp;").replace("<", "&lt;")
    for sign in ("\\", "|", "*", "_", "`", "["):
        plain = plain.replace(sign, f"\\{sign}")
    return plain


def _fenced(text: str) -> list[str]:
    return ["```text", text.rstrip(), "```", ""]
