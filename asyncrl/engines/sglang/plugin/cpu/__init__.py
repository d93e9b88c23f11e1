"""The platform by which stock SGLang serves on a CPU."""
