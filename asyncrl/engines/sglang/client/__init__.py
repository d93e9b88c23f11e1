"""The driver's HTTP client of SGLang and its router."""
