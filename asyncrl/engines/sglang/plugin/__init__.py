"""Plug-ins that run inside SGLang's processes; SGLang finds them by their entry points."""
