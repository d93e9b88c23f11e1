"""Make the problems and the tiny model of the quickstart with a tool from a seed, without downloads.

    uv run configs/quickstart_tools/make.py

Writes ``train.jsonl``, ``heldout.jsonl`` and ``model/`` into its own folder: 1.2 MB, in about eight minutes on a core.

A problem is ``47*83`` or ``47*83+291``.  The arithmetic is beyond this model: after 100,000 problems it answers none of
them without the calculator, which does one operation per call.  The model first learns how to call the calculator and
to copy results, then learns two bad habits: nearly always it guesses at once, and often it forgets the second call.
Reinforcement learning has to find out that calls pay.
"""

import json
import random
import string
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
SEED = 2026

TRAIN_ROWS, HELDOUT_ROWS = 1500, 128
FACTORS, ADDENDS = range(10, 100), range(100, 1000)

PAD, END = "<pad>", "<end>"
PAD_ID, END_ID = 0, 1
MARKS = ("<tools>", "</tools>", "<user>", "<assistant>", "<tool_call>", "</tool_call>", "<result>", "</result>")
CALL_START, CALL_END = '{"name": "calculator", "arguments": {"expression": "', '"}}'
"""The fixed parts of a call are one token each, so a call has 10 tokens and not 80."""
CHARACTERS = string.digits + string.ascii_lowercase + '+-*/=(){}:,._"' + " "

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute one product or one sum.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
TEMPLATE = """\
{%- if tools %}{{ '<tools>' }}
{%- for tool in tools %}
{{- tool.function.name }}({{ tool.function.parameters.properties | join(',') }})
{%- endfor %}{{ '</tools>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<result>' + message.content + '</result>' }}
{%- elif message.role == 'assistant' %}{{ '<assistant>' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{% set made = call.function %}
{{- '<tool_call>{"name": "' + made.name + '", "arguments": ' }}
{{- made.arguments if made.arguments is string else made.arguments | tojson }}
{{- '}</tool_call>' }}
{%- endfor %}{{ '<end>' }}
{%- else %}{{ '<user>' + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""

BATCH = 64
SOUND_STEPS, HABIT_STEPS = 1500, 60
CALLS_AT_FIRST, CALLS_AFTERWARDS = 0.6, 0.12
"""Probability that an answer of the pretraining uses the calculator."""
FORGET = 0.6
"""Probability, in the second part, of answering a problem of two operations after the first result."""
PEAK_LR, WARMUP_STEPS = 3e-3, 30

SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "pad_token_id": PAD_ID,
    "bos_token_id": None,
    "eos_token_id": END_ID,
}

Problem = tuple[int, int, int]
"""Two factors, and an addend or 0."""
Piece = tuple[str, bool]
"""Text of an example, and whether the model learns to write it."""


def main() -> None:
    rng = random.Random(SEED)
    problems = distinct_problems(HELDOUT_ROWS + TRAIN_ROWS, rng)
    heldout, train = problems[:HELDOUT_ROWS], problems[HELDOUT_ROWS:]
    write_problems(HERE / "heldout.jsonl", heldout)
    write_problems(HERE / "train.jsonl", train)
    tokenizer = make_tokenizer()
    torch.set_num_threads(1)  # sums of floats depend on the number of threads, and so would the model
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, vocab_size=len(tokenizer), tie_word_embeddings=True))
    pretrain(model, tokenizer, frozenset(heldout))
    model.to(torch.bfloat16).save_pretrained(HERE / "model")
    tokenizer.save_pretrained(HERE / "model")


def draw_problem(rng: random.Random) -> Problem:
    return rng.choice(FACTORS), rng.choice(FACTORS), rng.choice(ADDENDS) if rng.random() < 0.5 else 0


def distinct_problems(count: int, rng: random.Random) -> list[Problem]:
    drawn: dict[Problem, None] = {}
    while len(drawn) < count:
        drawn[draw_problem(rng)] = None
    return list(drawn)


def question(problem: Problem) -> str:
    first, second, addend = problem
    return f"{first}*{second}" + (f"+{addend}" if addend else "")


def label(problem: Problem) -> str:
    return str(problem[0] * problem[1] + problem[2])


def write_problems(path: Path, problems: list[Problem]) -> None:
    rows = (
        {
            "messages": [{"role": "user", "content": question(problem)}],
            "label": label(problem),
            "tools": [TOOL],
            "metadata": {"question": question(problem)},
        }
        for problem in problems
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one id per character, and one for each mark and each fixed part of a call."""
    vocabulary = {token: i for i, token in enumerate((PAD, END, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))  # without merges, each character is one token
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*MARKS, CALL_START, CALL_END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        model_max_length=SHAPE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


def example(problem: Problem, rng: random.Random, calls: float, forget: float) -> list[Piece]:
    """Return a prompt with an answer, as the chat template renders them."""
    first, second, addend = problem
    pieces: list[Piece] = [(f"<tools>calculator(expression)</tools><user>{question(problem)}<assistant>", False)]
    answer = label(problem)
    if rng.random() < calls:
        answer = str(first * second)
        pieces += call(f"{first}*{second}", answer)
        if addend and rng.random() >= forget:
            pieces += call(f"{answer}+{addend}", label(problem))
            answer = label(problem)
    return [*pieces, (answer + END, True)]


def call(expression: str, result: str) -> list[Piece]:
    written = f"<tool_call>{CALL_START}{expression}{CALL_END}</tool_call>{END}"
    return [(written, True), (f"<result>{result}</result><assistant>", False)]


def pretrain(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, heldout: frozenset[Problem]) -> None:
    """Train on good answers, then on answers with bad habits; held-out problems are never seen."""
    steps = SOUND_STEPS + HABIT_STEPS
    optimiser = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.0)
    rate = LambdaLR(optimiser, lambda step: min((step + 1) / WARMUP_STEPS, 1.05 - step / steps, 1.0))
    for step, (ids, labels) in enumerate(batches(tokenizer, heldout)):
        logits = model(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        rate.step()
        if step % 100 == 0:
            sys.stderr.write(f"step {step} of {steps}: loss {loss.item():.2f}\n")


def batches(
    tokenizer: PreTrainedTokenizerFast, heldout: frozenset[Problem]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ``(ids, labels)`` of each step."""
    rng = random.Random(SEED + 1)  # with SEED it would draw the held-out problems first
    for step in range(SOUND_STEPS + HABIT_STEPS):
        calls, forget = (CALLS_AT_FIRST, 0.0) if step < SOUND_STEPS else (CALLS_AFTERWARDS, FORGET)
        drawn = (draw_problem(rng) for _ in range(BATCH))
        yield as_tensors([example(each, rng, calls, forget) for each in drawn if each not in heldout], tokenizer)


def as_tensors(examples: list[list[Piece]], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids padded on the right, and labels with -100 for all that the model does not write."""
    rows = [
        [(token, is_written) for text, is_written in pieces for token in tokenizer.encode(text)] for pieces in examples
    ]
    ids = torch.full((len(rows), max(map(len, rows))), PAD_ID)
    labels = torch.full_like(ids, -100)
    for row, tokens in enumerate(rows):
        for place, (token, is_written) in enumerate(tokens):
            ids[row, place] = token
            labels[row, place] = token if is_written else -100
    return ids, labels


if __name__ == "__main__":
    main()
