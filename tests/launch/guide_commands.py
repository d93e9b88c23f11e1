"""The commands of slime's guides in guides.toml, as words with local files in place of the guides' paths."""

import json
import shlex
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config import Program

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
REWARD = "async def reward_func(args, sample, **kwargs):\n    return 1.0\n"
GENERATE = """
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

async def generate(args, sample: Sample, sampling_params) -> Sample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"text": sample.prompt, "sampling_params": sampling_params})
    tokens = state.tokenizer.encode(sample.prompt)
    response = state.tokenizer.encode(output["text"])
    sample.response, sample.tokens = output["text"], tokens + response
    sample.response_length, sample.loss_mask = len(response), [1] * len(response)
    sample.status = Sample.Status.COMPLETED
    return sample
"""
"""The shape of the function that guides 1 and 3 print, with one turn."""
CUSTOM_GENERATE = """
from slime.rollout.sglang_rollout import generate as generate_single

async def custom_generate(args, samples, evaluation=False):
    for sample in samples:
        for turn in range(args.max_turns):
            sample = await generate_single(args, sample, {"max_new_tokens": 8})
            if turn == 0:
                break
    return samples
"""
"""The shape of the function that guides 2 and 4 print, in a file whose name is the whole path."""
NUM_ROWS = 32
PROGRAMS: Mapping[str, Program] = {"train.py": "train.py", "train_async.py": "train_async.py"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideCommand:
    """A command of the guides, with ``{name}`` in place of each path."""

    name: str
    program: Program
    words: tuple[str, ...]
    stops: str | None
    """The beginning of the line with which it ends, or None if it starts a run."""
    notes: tuple[str, ...]
    """The beginnings of notes that it must print."""


def guide_commands() -> list[GuideCommand]:
    """All commands of ``guides.toml``."""
    content = tomllib.loads((Path(__file__).parent / "guides.toml").read_text())
    return [_command(content["arrays"], item) for item in content["command"]]


def _command(arrays: Mapping[str, str], item: Mapping[str, Any]) -> GuideCommand:
    words = _expanded(arrays, f"{item['text']} {item.get('adds', '')}")
    start = next(place for place, word in enumerate(words) if word in PROGRAMS)
    assert words[start - 1] in ("python", "python3")
    return GuideCommand(
        name=item["name"],
        program=PROGRAMS[words[start]],
        words=tuple(words[start + 1 :]),
        stops=item.get("stops"),
        notes=tuple(item.get("notes", ())),
    )


def _expanded(arrays: Mapping[str, str], text: str) -> list[str]:
    """The words of ``text``, with the words of an array in place of ``${NAME[@]}``."""
    words = list[str]()
    for word in shlex.split(text):
        name = word.removeprefix("${").removesuffix("[@]}")
        words += _expanded(arrays, arrays[name]) if word == f"${{{name}[@]}}" else [word]
    return words


def local_files(folder: Path) -> dict[str, str]:
    """Write the files that the commands name, and return the path of each by the name in braces."""
    model = folder / "model"
    shutil.copytree(QUICKSTART / "model", model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    for name in ("train", "heldout"):
        rows = [json.loads(line) for line in (QUICKSTART / f"{name}.jsonl").read_text().splitlines()[:NUM_ROWS]]
        _write(folder / f"{name}.jsonl", [_row(row["prompt"], row["label"]) for row in rows])
    (folder / "multiturn_logic.py").write_text(REWARD)
    (folder / "your_module").mkdir()
    (folder / "your_module" / "multiturn_logic.py").write_text(GENERATE + REWARD)
    (folder / "custom_generate.py").write_text(CUSTOM_GENERATE)
    (folder / "custom_rm.py").write_text(
        "class CustomRewardModel:\n"
        "    def compute_reward(self, prompts, responses):\n        return [1.0] * len(prompts)\n"
    )
    (folder / "filters.py").write_text(
        "def pop_first(args, rollout_id, buffer, num_samples):\n"
        "    samples = buffer[:num_samples]\n    del buffer[:num_samples]\n    return samples\n"
    )
    return {
        "model": str(model),
        "reference": str(model),
        "train": str(folder / "train.jsonl"),
        "held_out": str(folder / "heldout.jsonl"),
        "search": str(folder / "train.jsonl"),
        "work": str(folder),
    }


def _row(text: str, label: str) -> dict[str, Any]:
    """A row under the keys of all guides."""
    prompt = [{"role": "user", "content": text}]
    search = {"question": prompt, "final_answer": label, "metadata": {"session_id": "one"}, "tools": []}
    return {"prompt": prompt, "label": label, **search}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def with_files(words: tuple[str, ...], files: Mapping[str, str]) -> list[str]:
    """The words of a command with paths in place of the names in braces."""
    done = []
    for word in words:
        for name, path in files.items():
            word = word.replace(f"{{{name}}}", path)
        done.append(word)
    return done
