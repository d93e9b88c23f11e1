"""A model that thinks, answers and calls a tool, made of a table of what follows each token; it needs no training.

    <think> A-Z ... </think> a-z ... <|im_end|>          or a call of the tool in the place of <|im_end|>

The rows of the embedding are unit vectors and those of the output layer the logarithms of the table; two random layers
in between let each probability depend on all tokens before.  The tokenizer has a token for some pairs of letters, which
the model often writes letter by letter: text that is tokenised again has other tokens than the model wrote.
"""

import math
import string
from pathlib import Path
from typing import Any

from tests.unit.rollouts.gateway.templates import QWEN3

TOOL = "look"
CALL = f'<tool_call>\n{{"name": "{TOOL}", "arguments": {{}}}}\n</tool_call>'
"""One token, because a table of pairs of tokens cannot write JSON."""
PAIRS = tuple(first + second for first, second in zip(string.ascii_lowercase, string.ascii_lowercase[1:], strict=False))
SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")
VOCABULARY = (*SPECIAL, "<think>", "</think>", CALL, "\n", *(chr(code) for code in range(32, 127)), *PAIRS)
IDS = {token: place for place, token in enumerate(VOCABULARY)}
HIDDEN = 160
"""At least one dimension per token."""
_NEVER = -16.0
"""Logarithm of what does not follow: one in 10 million tokens."""


def thinking_model(folder: Path) -> Path:
    """Write model and tokenizer, with Qwen3's chat template, to ``folder`` and return it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=IDS["<|im_end|>"],
        bos_token_id=None,
        pad_token_id=0,
        initializer_range=0.02,
        dtype="float32",
    )
    model: Any = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(len(VOCABULARY), HIDDEN))
        # The last norm makes the vector of a token sqrt(HIDDEN) long.
        after = torch.tensor([_after(token) for token in VOCABULARY]) / math.sqrt(HIDDEN)
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, : len(VOCABULARY)] = after.T
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models  # type: ignore[import-untyped]
    from transformers import PreTrainedTokenizerFast

    merges = [(pair[0], pair[1]) for pair in PAIRS]
    words = Tokenizer(models.BPE(vocab=IDS, merges=merges))
    words.decoder = decoders.Fuse()
    words.add_special_tokens(list(SPECIAL))
    words.add_tokens(["<think>", "</think>", CALL])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<|im_end|>", chat_template=QWEN3
    )


def _after(token: str) -> list[float]:
    """Return the logarithm of the probability of each token behind ``token``."""
    small, large = (*string.ascii_lowercase, *PAIRS), tuple(string.ascii_uppercase)
    if token == "<think>" or token in large:
        shares = _spread(large, 0.92) | {"</think>": 0.08}
    elif token == "</think>" or token in small:
        shares = _spread(small, 0.94) | {"<|im_end|>": 0.03, CALL: 0.03}
    elif token == "\n":
        shares = {"<think>": 1.0}
    elif token == CALL:
        shares = {"<|im_end|>": 1.0}
    else:
        return [0.0] * len(VOCABULARY)  # the model writes none of these
    return [math.log(shares[each]) if each in shares else _NEVER for each in VOCABULARY]


def _spread(tokens: tuple[str, ...], share: float) -> dict[str, float]:
    return dict.fromkeys(tokens, share / len(tokens))
