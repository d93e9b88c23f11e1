"""A random Qwen3 of 64 tokens and two layers, in Hugging Face format, so that tests need no download.

The model has no end token: an answer is as long as its limit, unless the request names a stop token.
"""

from pathlib import Path
from typing import Any

VOCABULARY = ["<none>", "<pad>", *(chr(code) for code in range(ord("0"), ord("0") + 62))]


def tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write model and tokenizer to ``folder`` and return it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    _save(folder, Qwen3ForCausalLM, Qwen3Config(num_hidden_layers=2, **_SHAPE), seed)
    return folder


def tiny_mixture(folder: Path, *, seed: int = 0) -> Path:
    """Write a Qwen3-MoE of three layers, with 2 of 8 experts per token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        num_hidden_layers=3,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        **_SHAPE,
    )
    _save(folder, Qwen3MoeForCausalLM, config, seed)
    return folder


_SHAPE: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 1,
    "initializer_range": 0.1,
    "dtype": "float32",
}


def _save(folder: Path, model: Any, config: Any, seed: int) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-untyped]
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(seed)
    model(config).save_pretrained(folder)
    characters = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token="<pad>")
    )
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>").save_pretrained(folder)
