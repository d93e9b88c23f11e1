"""The driver's HTTP client for SGLang servers and the router."""
