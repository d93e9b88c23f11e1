"""Launch scripts, rehearsed with small models on few GPUs."""
