"""Log-prob differences that rounding explains."""
