"""Launch stock SGLang and control it over HTTP."""
