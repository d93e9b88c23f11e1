"""Prompts that worker processes read and tokenise during the run, in constant memory."""

from asyncrl.data.streaming.opened import open_stream
from asyncrl.data.streaming.stream import PromptStream

__all__ = ["PromptStream", "open_stream"]
