"""The tab *Samples*: lists of groups, one group side by side, one sample token by token."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson

from asyncrl.data.token_texts import TokenTexts, load_token_texts
from asyncrl.errors import DataError
from asyncrl.page.runs.run_files import RunFiles
from asyncrl.page.sample_index.filters import SORTS, Filter
from asyncrl.page.sample_index.groups import GROUPS_PER_PAGE, Group, GroupLists, Key
from asyncrl.page.sample_index.index import Progress, SampleIndex
from asyncrl.page.sample_index.step_files import read_samples
from asyncrl.page.sample_index.text_search import Question, TextSearch
from asyncrl.page.sample_index.token_view import COLOURS, PAGE_TOKENS, Token, TokenView, prompt_tokens
from asyncrl.page.tabs.tab import PageRequest, Views

TEXT_COLUMNS = ("prompt", "label", "response", "reward", "reward_parts", "lag", "finish", "seconds", "resumed_at")
TOKEN_COLUMNS = (
    *("step", "epoch", "row", "label", "reward", "reward_parts", "lag", "finish", "seconds", "resumed_at", "metadata"),
    *("prompt_tokens", "tokens", "logprobs", "trainer_logprobs", "advantages", "loss_mask", "spans", "turns"),
)
CUT = 1_200
"""Characters of a text in a group that are shown with a link to the whole: of a response, a third from its end."""
PROMPT_TOKENS = 1_000
"""Tokens at the end of a prompt that are shown before a link to all."""
HEADS: Mapping[str, str] = {
    "step": "Step",
    "row": "Row",
    "mean": "Mean reward",
    "lowest": "Min",
    "highest": "Max",
    "spread": "Spread",
    "length": "Mean tokens",
    "longest": "Most tokens",
    "lag": "Lag",
    "diff": "Log-prob diff.",
    "seconds": "Seconds",
}
"""The heads of the sorted columns; each is a link."""
assert HEADS.keys() == SORTS.keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One sample in a group."""

    sample: int
    facts: Sequence[tuple[str, str]]
    text: str
    """The response, or its beginning."""
    num_hidden: int
    """Characters that are left out after ``text``."""
    end: str
    """The end of the response, after these."""
    link: str


def index_of(run: RunFiles) -> SampleIndex:
    """Return the index of a run, which views share."""
    if "sample_index" not in run.parts:
        run.parts["sample_index"] = SampleIndex(run.path)
    index: SampleIndex = run.parts["sample_index"]
    return index


def progress_facts(progress: Progress) -> Iterator[tuple[str, str]]:
    """Yield name and value of what the index has."""
    count = f"{progress.num_indexed:,} of {progress.num_files:,}, newest first"
    yield "Steps in the index", f"{progress.num_indexed:,}" if progress.is_complete else count
    if progress.in_memory:
        yield "Index", f"in memory only: {progress.in_memory}"


def link(entries: Mapping[str, Any], **changes: Any) -> str:
    """Return the address of this tab with some entries replaced; None removes one."""
    return "?" + urlencode({name: value for name, value in {**entries, **changes}.items() if value is not None})


def show(request: PageRequest) -> Mapping[str, Any]:
    """Return the values of the template: of a list, or of the group or the sample that the address names."""
    chosen = Filter.of(request.query)
    key = (request.number("step", -1), request.number("group", -1, least=-(2**53)))
    if key[0] < 0 or "group" not in request.query:
        return _list(request, chosen)
    try:
        _check_step(request.run, key[0])
        return _sample(request, chosen, key) if "sample" in request.query else _group(request, chosen, key)
    except DataError as error:
        return {"view": "samples_missing.html", "is_live": False, "text": str(error), "back": link(chosen.query())}


def _check_step(run: RunFiles, step: int) -> None:
    """Raise DataError if the file of a step is left from the former life of a resumed run."""
    if (last := run.rows.last_step) is not None and step > last:
        raise DataError(f"step {step} was trained before the run resumed at an earlier step")


# ---- lists


def _list(request: PageRequest, chosen: Filter) -> Mapping[str, Any]:
    index = index_of(request.run)
    progress = index.refresh(last_step=request.run.rows.last_step)
    search = _search(request.run, index, chosen)
    page = request.number("page", 0, most=10**6)
    groups = _lists(index, chosen, search).page(page)
    total = groups[0].total if groups else 0
    facts = [*progress_facts(progress), ("Groups", f"{total:,}"), *(_search_facts(search) if search else ())]
    entries = chosen.query()
    return {
        "view": "samples_list.html",
        "facts": facts,
        "is_incomplete": not progress.is_complete or (search is not None and search.is_running),
        "problems": progress.problems,
        "has_files": progress.num_files > 0,
        "form": request.query if entries else {},
        "chosen": chosen,
        "heads": list(_heads(chosen)),
        "rows": [(group, link(entries, step=group.step, group=group.group_id), _ends(group)) for group in groups],
        "range": (page * GROUPS_PER_PAGE + 1, page * GROUPS_PER_PAGE + len(groups), total),
        "before": link(entries, page=page - 1) if page else "",
        "after": link(entries, page=page + 1) if (page + 1) * GROUPS_PER_PAGE < total else "",
    }


def _lists(index: SampleIndex, chosen: Filter, search: TextSearch | None) -> GroupLists:
    return GroupLists(index.cursor(), chosen, search.found() if search else None)


def _search(run: RunFiles, index: SampleIndex, chosen: Filter) -> TextSearch | None:
    """Return the search for the filter's text, begun now or earlier; another text ends it."""
    question = Question(chosen.text, chosen.from_step, chosen.to_step) if chosen.text else None
    search: TextSearch | None = run.parts.get("text_search")
    if search is not None and search.question != question:
        search.is_cancelled = True
        search = None
    if search is None and question is not None:
        search = TextSearch(run.path, question)
    run.parts["text_search"] = search
    if search is not None:
        search.refresh(index.steps())
    return search


def _search_facts(search: TextSearch) -> Iterator[tuple[str, str]]:
    count = f"{search.num_searched:,} of {search.num_steps:,} steps"
    if search.num_searched >= search.num_steps:
        yield "Whole texts searched", f"all {search.num_steps:,} chosen steps"
    elif search.is_late:
        yield "Whole texts searched", f"{count}, down to step {search.reached}, in the time limit; choose fewer steps"
    else:
        yield "Whole texts searched", f"{count}, newest first; in the others, only the beginning"


def _heads(chosen: Filter) -> Iterator[tuple[str, str, str]]:
    """Yield text, link and ``aria-sort`` of each column that can be sorted."""
    for name, text in HEADS.items():
        is_sorted = name == chosen.sort
        state = ("descending" if chosen.descending else "ascending") if is_sorted else "none"
        order = "up" if is_sorted and chosen.descending else None
        entries = {key: value for key, value in chosen.query().items() if key != "order"}
        yield text, link(entries, sort=name, order=order), state


def _ends(group: Group) -> str:
    counts = {"stop": group.stopped, "length": group.cut, "abort": group.others}
    return ", ".join(f"{count} {finish}" for finish, count in counts.items() if count)


# ---- one group


def _group(request: PageRequest, chosen: Filter, key: Key) -> Mapping[str, Any]:
    index = index_of(request.run)
    rows = read_samples(request.run.path, *key, TEXT_COLUMNS)
    if not rows:
        raise DataError(f"step {key[0]} has no samples of group {key[1]}")
    before, after = _lists(index, chosen, request.run.parts.get("text_search")).around(key)
    entries, is_whole = chosen.query(), request.query.get("full") == "1"
    here = {**entries, "step": key[0], "group": key[1]}
    numbers = _indexed(index, key)
    prompt = rows[0]["prompt"]
    return {
        "view": "samples_group.html",
        "is_live": False,
        "key": key,
        "back": link(entries),
        "before": link(entries, step=before[0], group=before[1]) if before else "",
        "after": link(entries, step=after[0], group=after[1]) if after else "",
        "prompt": prompt if is_whole else prompt[-CUT:],
        "prompt_is_cut": not is_whole and len(prompt) > CUT,
        "label": rows[0]["label"],
        "whole": link(here, full=1),
        "cards": [_card(row, numbers.get(row["sample"], {}), here, is_whole) for row in rows],
    }


def _indexed(index: SampleIndex, key: Key) -> dict[int, dict[str, str]]:
    """Return the numbers of the samples of a group that only the index has."""
    sql = """
    SELECT sample, response_tokens, trained_tokens, turns, logprob_diff FROM samples
    WHERE step = $step AND group_id = $group_id
    """
    found = index.cursor().execute(sql, {"step": key[0], "group_id": key[1]}).fetchall()
    return {
        sample: {
            "Tokens": f"{tokens:,}",
            "In the loss": f"{trained:,}",
            **({"Turns": str(turns)} if turns else {}),
            **({} if diff is None else {"Log-prob difference": f"{diff:.4f}"}),
        }
        for sample, tokens, trained, turns, diff in found
    }


def _card(row: Mapping[str, Any], numbers: Mapping[str, str], here: Mapping[str, Any], is_whole: bool) -> Card:
    text = row["response"]
    num_hidden, num_last = 0 if is_whole else max(0, len(text) - CUT), CUT // 3
    return Card(
        sample=row["sample"],
        facts=[*_facts(row), *numbers.items()],
        text=text[: CUT - num_last] if num_hidden else text,
        num_hidden=num_hidden,
        end=text[-num_last:] if num_hidden else "",
        link=link(here, sample=row["sample"]),
    )


def _facts(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and value of what a row has besides texts and tokens."""
    yield "Reward", f"{row['reward']:g}"
    yield from _parts(row["reward_parts"])
    yield "Finish", row["finish"]
    yield "Lag", "none" if row["lag"] is None else str(row["lag"])
    yield "Seconds", f"{row['seconds']:.2f}"
    if row["resumed_at"]:
        yield "Resumed at token", f"{row['resumed_at']:,}"


def _parts(text: str | None) -> Iterator[tuple[str, str]]:
    """Yield the entries of a dict reward."""
    parts = orjson.loads(text) if text else {}
    for name, value in parts.items() if isinstance(parts, dict) else ():
        yield f"Reward: {name}", f"{value:g}" if isinstance(value, float) else str(value)


# ---- one sample


def _sample(request: PageRequest, chosen: Filter, key: Key) -> Mapping[str, Any]:
    number = request.number("sample", 0)
    rows = read_samples(request.run.path, *key, TOKEN_COLUMNS, number)
    if not rows:
        raise DataError(f"step {key[0]} has no sample {number} of group {key[1]}")
    row, (tokenizer, problem) = rows[0], _tokenizer(request.run)
    texts, count = (
        tokenizer.of([*row["prompt_tokens"], *row["tokens"]]) if tokenizer else None,
        len(row["prompt_tokens"]),
    )
    here = {**chosen.query(), "step": key[0], "group": key[1]}
    return {
        "view": "samples_tokens.html",
        "is_live": False,
        "key": key,
        "sample": number,
        "facts": [
            *_facts(row),
            ("Tokens", f"{len(row['tokens']):,}"),
            ("In the loss", f"{sum(row['loss_mask']):,}"),
            *([("Turns", f"{len(row['turns']):,}")] if row["turns"] else []),
            ("Row", f"{row['row']:,}"),
            ("Label", row["label"]),
        ],
        "metadata": row["metadata"],
        "problem": problem,
        "up": link(here),
        "back": link(chosen.query()),
        **_prompt(request, prompt_tokens(row["prompt_tokens"], texts[:count] if texts else None), here),
        **_tokens(request, TokenView(row, texts[count:] if texts else None), here),
        **_neighbours(index_of(request.run), key, number, {**here, "colour": request.query.get("colour")}),
    }


def _prompt(request: PageRequest, tokens: Sequence[Token], here: Mapping[str, Any]) -> dict[str, Any]:
    """Return the end of the prompt, or all of it."""
    num_hidden = 0 if request.query.get("prompt") == "all" else max(0, len(tokens) - PROMPT_TOKENS)
    whole = link(here, sample=request.number("sample", 0), prompt="all")
    return {"prompt": tokens[num_hidden:], "num_hidden": num_hidden, "whole_prompt": whole}


def _tokens(request: PageRequest, view: TokenView, here: Mapping[str, Any]) -> dict[str, Any]:
    """Return a page of the response's tokens, and the links to other pages, colours and forms."""
    colour = request.query.get("colour", "")
    colour = colour if colour in COLOURS else "version"
    as_table = request.query.get("as") == "table"
    page = request.number("page", 0, most=max(0, len(view) - 1) // PAGE_TOKENS)
    form = "table" if as_table else None
    this = {**here, "sample": request.number("sample", 0), "colour": colour, "as": form, "page": page}
    starts = range(0, len(view), PAGE_TOKENS)
    return {
        "parts": list(view.parts(colour, page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)),
        "legend": view.legend(colour),
        "colours": [(link(this, colour=name), each.title, name == colour) for name, each in COLOURS.items()],
        "as_table": as_table,
        "other_form": link({**this, "as": None if as_table else "table"}),
        "pages": [
            (link(this, page=place), _page_title(view, start), place == page) for place, start in enumerate(starts)
        ],
    }


def _page_title(view: TokenView, start: int) -> str:
    """Return the range of a page of tokens, and what begins on it, so that a person finds where the weights changed."""
    stop = min(start + PAGE_TOKENS, len(view))
    marks = view.marks(start, stop)
    return f"{start:,} to {stop - 1:,}{f' ({", ".join(marks)})' if marks else ''}"


def _neighbours(index: SampleIndex, key: Key, sample: int, this: Mapping[str, Any]) -> dict[str, str]:
    """Return links to the samples before and after one in its group; empty where there is none."""
    sql = "SELECT sample FROM samples WHERE step = $step AND group_id = $group_id ORDER BY sample"
    found = index.cursor().execute(sql, {"step": key[0], "group_id": key[1]}).fetchall()
    before = [number for (number,) in found if number < sample][-1:]
    after = [number for (number,) in found if number > sample][:1]
    links = {
        name: [link(this, sample=each) for each in place] for name, place in (("before", before), ("after", after))
    }
    return {name: "".join(found) for name, found in links.items()}


def _tokenizer(run: RunFiles) -> tuple[TokenTexts | None, str]:
    """Return the run's tokenizer, or None and the reason."""
    if "token_texts" not in run.parts:
        problem = ""
        given = run.settings().get("hf-checkpoint")
        for folder in (run.path / "model", *([Path(str(given))] if given else [])):
            try:
                run.parts["token_texts"] = load_token_texts(folder)
                break
            except DataError as error:
                problem = str(error)
        else:
            return None, problem
    return run.parts["token_texts"], ""


VIEWS = Views(show=show)
