# ruff: noqa: RUF001
"""Small chat templates with the structure of models' templates, and tokenizers of bytes and special tokens."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-untyped]

from asyncrl.data.byte_level import byte_of_character

SPECIALS = (
    "<|im_start|>",
    "<|im_end|>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>",
    "<｜calls▁begin｜>",
    "<｜calls▁end｜>",
    "<｜output▁begin｜>",
    "<｜output▁end｜>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
)

_TOOL_TURN = """
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"""
_CALLS = """
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or content %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n' + call.function.name + '\n</tool_call>' }}
{%- endfor %}"""

QWEN25 = (
    """
{%- if tools %}{{ '<|im_start|>system\n# Tools\n' + tools | tojson + '<|im_end|>\n' }}
{%- elif messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}"""
    + _TOOL_TURN
    + """
{%- elif message.role == 'assistant' and message.tool_calls %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{ '\n' + message.content }}{% endif %}
{%- for call in message.tool_calls %}{{ '\n<tool_call>\n' + call.function.name + '\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
)
"""A system message by default, and no thinking."""

_QWEN3 = (
    """
{%- if tools %}{{ '<|im_start|>system\n# Tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'tool' %}"""
    + _TOOL_TURN
    + """
{%- elif message.role == 'assistant' %}
{%- set thought = message.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (ALWAYS or loop.last or thought) %}
{{- '<think>\n' + thought + '\n</think>\n\n' }}
{%- endif %}
{{- content }}"""
    + _CALLS
    + """
{{- '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\nPROMPT' }}{% endif %}"""
)
QWEN3 = _QWEN3.replace("ALWAYS", "false").replace("PROMPT", "")
"""Thinking only behind the last question."""
QWEN35 = _QWEN3.replace("ALWAYS", "true").replace("PROMPT", "<think>\\n")
"""QWEN3 with the start of the thinking in the generation prompt."""

R1 = """
{%- set ns = namespace(is_tool=false, called=false) %}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'user' %}{% set ns.is_tool = false %}{{ '<｜User｜>' + message.content }}
{%- elif message.role == 'tool' %}
{%- set ns.is_tool = true %}{{ '<｜output▁begin｜>' + message.content + '<｜output▁end｜>' }}
{%- else %}
{%- if message.tool_calls %}
{%- if not ns.called %}{{ '<｜Assistant｜>' }}{% endif %}{% set ns.called = true %}
{%- for call in message.tool_calls %}{{ '<｜calls▁begin｜>' + call.function.name + '<｜calls▁end｜>' }}{% endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- if message.content is not none %}
{%- if ns.is_tool %}{{ message.content + '<｜end▁of▁sentence｜>' }}
{%- else %}{{ '<｜Assistant｜>' + message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}
{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""
"""Thinking is always dropped, an answer to a tool has no header, and tool calls come instead of the content."""

GLM45 = """[gMASK]<sop>
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content or '' %}
{%- if message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
{%- elif message.role == 'assistant' %}
{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set content = content.split('</think>')[-1] %}
{%- endif %}
{{- '<|assistant|>\n<think>' + (thought if loop.index0 > ns.last else '') + '</think>' }}
{%- if content.strip() %}{{ '\n' + content.strip() }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name + '\n</tool_call>' }}{% endfor %}
{%- else %}{{ '<|' + message.role + '|>\n' + content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""An answer has no end: the header of the next message ends it."""

GLM4 = """[gMASK]<sop>
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|observation|>\n' + message.content }}
{%- elif message.tool_calls %}
{%- for call in message.tool_calls %}{{ '<|assistant|>' + call.function.name + '\n{}' }}{% endfor %}
{%- else %}{{ '<|' + message.role + '|>\n' + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""Tool calls hide the content."""


def byte_tokenizer(folder: Path, template: str) -> Path:
    """Write a tokenizer with one token per byte and per special token."""
    characters = sorted(byte_of_character())
    words = Tokenizer(models.BPE(vocab={each: place for place, each in enumerate(characters)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(list(SPECIALS))
    folder.mkdir(parents=True, exist_ok=True)
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder
