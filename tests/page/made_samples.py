"""A run with one sample of 32,000 tokens and one of several turns with tool calls, in the format of a run."""

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers  # type: ignore[import-untyped]

from asyncrl.rollout_log.files import file_of, schema

LONG_TOKENS = 32_000
SPECIAL = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
PROMPT = "<|im_start|>user\nWhat is the mean height of the towers in Ulm and Köln?<|im_end|>\n<|im_start|>assistant\n"
THOUGHT = "So the carry is one. Wait, check this again: 17 * 24 = 408.\nTherefore the sum of the digits is 12.\n\n"
TURNS = (
    ("turn", 'I look up both.\n<tool_call>\n{"name": "height", "arguments": {"tower": "Ulm"}}\n</tool_call><|im_end|>'),
    ("observation", '{"metres": 161.5}'),
    ("turn", '<tool_call>\n{"name": "height", "arguments": {"tower": "Köln"}}\n</tool_call><|im_end|>'),
    ("observation", "error: no such tower"),
    ("turn", "Köln has 157 m, so the mean is 159.3 m. ✓<|im_end|>"),
)


def _as_written(kind: str, text: str) -> str:
    """Return the text of a part with what the chat template adds to the answer of a tool."""
    around = ("\n<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    return text if kind == "turn" else text.join(around)


def write_samples(run_dir: Path) -> None:
    """Write step 7 with the group 70 of both samples, and the tokenizer."""
    words = _tokenizer()
    (run_dir / "model").mkdir(parents=True)
    words.save(str(run_dir / "model" / "tokenizer.json"))
    rows = [_long(words), _with_tools(words)]
    path = file_of(run_dir, 7)
    path.parent.mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema()), path)
    row = {"step": 7, "time/step_s": 1.0, "reward/mean": 0.5}
    (run_dir / "metrics.jsonl").write_bytes(orjson.dumps(row) + b"\n")


def _tokenizer() -> Any:
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator([THOUGHT, PROMPT, *(text for _, text in TURNS)], trainer)
    words.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    return words


def _long(words: Any) -> dict[str, Any]:
    thought = words.encode(THOUGHT).ids
    ids = [*(thought * (LONG_TOKENS // len(thought) + 1))[: LONG_TOKENS - 1], words.token_to_id("<|im_end|>")]
    half = LONG_TOKENS // 2
    spans = [
        {"version": 5, "step": 5, "start": 0, "stop": half},
        {"version": 6, "step": 6, "start": half, "stop": LONG_TOKENS},
    ]
    return _row(words, sample=0, ids=ids, text=words.decode(ids), spans=spans, resumed_at=half, reward=1.0)


def _with_tools(words: Any) -> dict[str, Any]:
    ids: list[int] = []
    mask: list[int] = []
    turns: list[dict[str, Any]] = []
    spans: list[dict[str, int]] = []
    for kind, text in TURNS:
        part, start = words.encode(_as_written(kind, text)).ids, len(ids)
        ids += part
        mask += [int(kind == "turn")] * len(part)
        if kind == "turn":
            turns.append({"call": len(turns), "start": start, "stop": len(ids), "finish": "stop", "reward": None})
            spans.append({"version": 6, "step": 6, "start": start, "stop": len(ids)})
    text = "".join(_as_written(*part) for part in TURNS)
    return _row(words, sample=1, ids=ids, text=text, spans=spans, turns=turns, mask=mask, reward=0.0)


def _row(words: Any, *, ids: list[int], text: str, mask: list[int] | None = None, **more: Any) -> dict[str, Any]:
    mask = mask or [1] * len(ids)
    logprobs = [-((place * 7919) % 100) / 25 * each for place, each in enumerate(mask)]
    plain = {
        "step": 7,
        "group_id": 70,
        "rollout": more["sample"],
        "epoch": 0,
        "row": 12,
        "prompt": PROMPT,
        "label": '"159.3"',
        "prompt_tokens": words.encode(PROMPT).ids,
        "response": text,
        "tokens": ids,
        "logprobs": logprobs,
        "trainer_logprobs": [value * 1.01 for value in logprobs],
        "advantages": [2 * more["reward"] - 1] * len(ids),
        "loss_mask": mask,
        "reward_parts": None,
        "lag": 2,
        "turns": [],
        "finish": "stop",
        "seconds": 41.5,
        "resumed_at": 0,
        "metadata": '{"source": "towers"}',
    }
    return plain | more
