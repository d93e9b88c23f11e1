"""Memory estimates per GPU, made before anything starts.  Imports neither torch nor Megatron."""
