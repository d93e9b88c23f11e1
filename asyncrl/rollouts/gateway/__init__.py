"""The HTTP server through which agents reach their episodes, with the APIs of SGLang, OpenAI and Anthropic."""
