"""The Megatron model: its layers, its packed inputs and its log-probs."""
