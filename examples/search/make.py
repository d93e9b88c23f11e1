"""Make a corpus, questions and a tiny model for the search example from a seed, without downloads.

    uv run examples/search/make.py

Writes into ``examples/search/data/``:

    corpus.jsonl        people, towns and bridges that do not exist, one document each
    train.jsonl         questions with one fact, and with two facts in a row
    heldout.jsonl       the same about other people, towns and bridges
    model/              a Qwen3 with random weights and a byte-level vocabulary, to try the example on a CPU

No model can know the answers, so only a search finds them.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

DATA = Path(__file__).resolve().parent / "data"
SEED = 2026
NUM_TOWNS, NUM_HELDOUT = 400, 50
"""Towns; each has a founder and a bridge, and so three documents and four questions."""

FIRST, LAST = (
    ("ka", "lin", "mor", "ost", "ta", "ver", "sel", "bru", "yel", "dun"),
    ("dal", "holm", "by", "gard", "wick"),
)
NAMES = ("Anna", "Boris", "Clara", "David", "Edda", "Felix", "Greta", "Henrik", "Ilse", "Jonas")
TRADES = ("glass maker", "miller", "cartographer", "shipwright", "printer", "weaver")
RIVERS = ("Aster", "Brenna", "Corve", "Dravik", "Elmar", "Fosse")

INSTRUCTION = (
    "Answer the question. Think first between <think> and </think>. If you need a fact, search with "
    "<search> query </search>; the results come between <information> and </information>. You may search several "
    "times. Give the answer alone between <answer> and </answer>. Question: "
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    rng = random.Random(SEED)
    towns = [*make_towns(rng)]
    DATA.mkdir(exist_ok=True)
    documents = [document for town in towns for document in documents_of(town)]
    rows = [{"id": str(place), "contents": f'"{title}"\n{text}'} for place, (title, text) in enumerate(documents)]
    write(DATA / "corpus.jsonl", rows)
    heldout, train = towns[:NUM_HELDOUT], towns[NUM_HELDOUT:]
    for name, part in (("heldout", heldout), ("train", train)):
        questions = [row for town in part for row in questions_of(town)]
        rng.shuffle(questions)
        write(DATA / f"{name}.jsonl", questions)
    make_model([row["contents"] for row in rows])


def make_towns(rng: random.Random) -> Iterator[dict[str, str]]:
    """Yield towns whose names, founders and bridges are all different."""
    used: set[str] = set()

    def fresh(draw: list[str]) -> str:
        name = next(each for each in draw if each not in used)
        used.add(name)
        return name

    places = [f"{a}{b}{c}".capitalize() for a in FIRST for b in FIRST for c in LAST]
    people = [f"{first} {place}er" for first in NAMES for place in places]
    bridges = [f"{place} Bridge" for place in places]
    for names in (places, people, bridges):
        rng.shuffle(names)
    for _ in range(NUM_TOWNS):
        yield {
            "town": fresh(places),
            "founder": fresh(people),
            "bridge": fresh(bridges),
            "river": rng.choice(RIVERS),
            "trade": rng.choice(TRADES),
            "year": str(rng.randrange(900, 1800)),
        }


def documents_of(town: dict[str, str]) -> list[tuple[str, str]]:
    return [
        (town["town"], "{town} is a town on the river {river}. It was founded in {year} by {founder}.".format(**town)),
        (town["founder"], "{founder} was a {trade} who founded a town in {year}.".format(**town)),
        (town["bridge"], "The {bridge} is the oldest bridge of the town {town}.".format(**town)),
    ]


def questions_of(town: dict[str, str]) -> Iterator[dict[str, object]]:
    """Yield two questions that need one document, and two that need two."""
    asked = (
        ("Who founded the town {town}?", "founder", 1),
        ("On which river lies the town {town}?", "river", 1),
        ("What was the trade of the founder of the town {town}?", "trade", 2),
        ("On which river lies the town of the {bridge}?", "river", 2),
    )
    for question, answer, hops in asked:
        content = INSTRUCTION + question.format(**town)
        yield {
            "messages": [{"role": "user", "content": content}],
            "label": town[answer],
            "metadata": {"hops": hops},
        }


def write(path: Path, rows: list[dict[str, object]] | list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_model(texts: list[str]) -> None:
    """Write a model that knows nothing, with a vocabulary for the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [*texts, INSTRUCTION], trainers.BpeTrainer(vocab_size=1024, special_tokens=specials, initial_alphabet=alphabet)
    )
    words = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(DATA / "model")
    words.save_pretrained(DATA / "model")


if __name__ == "__main__":
    main()
