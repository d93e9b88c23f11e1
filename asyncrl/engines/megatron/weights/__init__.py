"""Weights on their way: from Hugging Face names to Megatron's, and out to engines."""
