"""An asyncio-first asynchronous RL trainer for large language models: SGLang generates while Megatron trains."""
