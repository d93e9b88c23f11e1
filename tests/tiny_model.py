"""A random Qwen3 of 64 tokens and two layers, in Hugging Face format, so that tests need no download.

The model has no end token: an answer is as long as its limit, unless the request names a stop token.
"""

from pathlib import Path

VOCABULARY = ["<none>", "<pad>", *(chr(code) for code in range(ord("0"), ord("0") + 62))]


def tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write model and tokenizer to ``folder`` and return it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-untyped]
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=1,
        initializer_range=0.1,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    characters = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token="<pad>")
    )
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>").save_pretrained(folder)
    return folder
