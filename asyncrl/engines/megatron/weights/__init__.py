"""Weights between Hugging Face names and Megatron's, and the trainer's end of weight updates."""
