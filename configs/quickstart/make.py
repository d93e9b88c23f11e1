"""Make the quickstart's problems and its two tiny models from a seed, without downloads.

    uv run configs/quickstart/make.py

Writes ``train.jsonl``, ``heldout.jsonl``, ``model/`` (Qwen3) and ``model_moe/`` (Qwen3-MoE) into its own folder:
1.6 MB in all, in about two minutes on one CPU core.

A problem is a sum, ``347+3=``.  Its answer carries one over at a time, ``348+2=349+1=350``, and has 4 to 52 tokens.
The models first learn to answer correctly, and then learn two errors on purpose: more often than not they forget the
rest (``348+2=349``), and sometimes they miscount.  Reinforcement learning has to undo both, so answers grow longer as
they become correct.
"""

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

HERE = Path(__file__).resolve().parent
SEED = 2026

TRAIN_ROWS, HELDOUT_ROWS = 4000, 128
FIRST = range(100, 991)
SECOND_PERCENT = {1: 20, 2: 18, 3: 15, 4: 12, 5: 10, 6: 8, 7: 7, 8: 5, 9: 5}
"""Frequency of each second number, in per cent; long answers are rare."""

PAD, END = "<pad>", "<end>"
PAD_ID, END_ID, VOCABULARY = 0, 1, 64
CHARACTERS = string.digits + string.ascii_lowercase + string.punctuation[:25] + " "

BATCH = 64
SOUND_STEPS, HABIT_STEPS = 180, 60
FORGET, MISCOUNT = 0.53, 0.03
"""Probabilities, per number carried over, of forgetting the rest and of miscounting by one."""
PEAK_LR, WARMUP_STEPS = 3e-3, 30

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "pad_token_id": PAD_ID,
    "bos_token_id": None,
    "eos_token_id": END_ID,
}
EXPERTS = {
    # On GPUs, SGLang's kernels for mixtures of experts need a head dimension of 64 or more.
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}

Problem = tuple[int, int]


def main() -> None:
    rng = random.Random(SEED)
    problems = distinct_problems(HELDOUT_ROWS + TRAIN_ROWS, rng)
    heldout, train = problems[:HELDOUT_ROWS], problems[HELDOUT_ROWS:]
    write_problems(HERE / "heldout.jsonl", heldout)
    write_problems(HERE / "train.jsonl", train)
    tokenizer = make_tokenizer()
    for folder, build in (("model", make_dense), ("model_moe", make_moe)):
        torch.manual_seed(SEED)
        model = build()
        pretrain(model, tokenizer, frozenset(heldout))
        model.to(torch.bfloat16).save_pretrained(HERE / folder)
        tokenizer.save_pretrained(HERE / folder)


def draw_problem(rng: random.Random) -> Problem:
    return rng.choice(FIRST), rng.choices([*SECOND_PERCENT], [*SECOND_PERCENT.values()])[0]


def distinct_problems(count: int, rng: random.Random) -> list[Problem]:
    """Return about ``count`` distinct problems in random order, so that every slice has the same mixture."""
    problems = [
        (first, second)
        for second, percent in SECOND_PERCENT.items()
        for first in rng.sample(FIRST, round(count * percent / 100))
    ]
    rng.shuffle(problems)
    return problems


def prompt_of(problem: Problem) -> str:
    return f"{problem[0]}+{problem[1]}="


def answer_to(problem: Problem, rng: random.Random, forget: float, miscount: float) -> str:
    """Return an answer that carries one over at a time.

    ``forget`` and ``miscount`` are the probabilities of each error per number carried over.
    """
    value, rest = problem
    steps = []
    while rest:
        value += rng.choice((0, 2)) if rng.random() < miscount else 1
        rest = 0 if rng.random() < forget else rest - 1
        steps.append(f"{value}+{rest}" if rest else str(value))
    return "=".join(steps)


def write_problems(path: Path, problems: list[Problem]) -> None:
    rows = ({"prompt": prompt_of(problem), "label": str(sum(problem))} for problem in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one id per character, which adds no special tokens."""
    vocabulary = {token: i for i, token in enumerate((PAD, END, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))  # without merges, each character is one token
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        model_max_length=SHAPE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


def make_dense() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True))


def make_moe() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SHAPE, **EXPERTS}, tie_word_embeddings=False))


def pretrain(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, heldout: frozenset[Problem]) -> None:
    """Train on correct answers, then on answers with errors; held-out problems are never seen."""
    steps = SOUND_STEPS + HABIT_STEPS
    optimiser = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.0)
    rate = LambdaLR(optimiser, lambda step: min((step + 1) / WARMUP_STEPS, 1.05 - step / steps, 1.0))
    for ids, labels in batches(tokenizer, heldout):
        logits = model(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        rate.step()


def batches(
    tokenizer: PreTrainedTokenizerFast, heldout: frozenset[Problem]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ``(ids, labels)`` of each step."""
    rng = random.Random(SEED)
    for step in range(SOUND_STEPS + HABIT_STEPS):
        habits = (0.0, 0.0) if step < SOUND_STEPS else (FORGET, MISCOUNT)
        drawn = (draw_problem(rng) for _ in range(BATCH))
        pairs = [(prompt_of(p), answer_to(p, rng, *habits)) for p in drawn if p not in heldout]
        yield as_tensors(pairs, tokenizer)


def as_tensors(pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids padded on the right, and labels with -100 for prompt and padding."""
    prompts = [tokenizer.encode(prompt) for prompt, _ in pairs]
    answers = [[*tokenizer.encode(answer), END_ID] for _, answer in pairs]
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(pairs), longest), PAD_ID)
    labels = torch.full((len(pairs), longest), -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


if __name__ == "__main__":
    main()
