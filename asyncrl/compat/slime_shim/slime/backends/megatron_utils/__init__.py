"""The names of slime's Megatron backend."""
