"""Prompts that worker processes read and tokenise during the run, in constant memory."""
