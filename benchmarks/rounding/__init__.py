"""Rounding of log-probs in bfloat16 and fp8."""
