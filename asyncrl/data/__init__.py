"""Prompt files, the tokenizer, and the position within the prompts."""

from asyncrl.data.prompts import EndlessPrompts, load_held_out, load_prompts
from asyncrl.data.tokenizer import TextTokenizer, load_tokenizer

__all__ = ["EndlessPrompts", "TextTokenizer", "load_held_out", "load_prompts", "load_tokenizer"]
