"""The process of a trainer rank: its settings, object collectives, the fused optimizer, and CUDA emulation on a CPU."""
