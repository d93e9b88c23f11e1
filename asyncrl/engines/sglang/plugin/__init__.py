"""Plug-ins that run inside SGLang's own processes, found by their entry points."""
