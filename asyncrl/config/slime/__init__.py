"""The status in asyncrl of every flag of slime, and of Megatron's flags in slime's scripts."""
