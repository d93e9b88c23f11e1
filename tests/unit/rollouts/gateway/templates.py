"""Chat templates with the structure of well-known ones, and a byte-level tokenizer with their special tokens."""

import functools
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # type: ignore[import-untyped]

from asyncrl.data.tokenizer import TextTokenizer, load_tokenizer

_QWEN_TOOLS = """
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- "# Tools\\n<tools>" }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
"""
_QWEN_CALLS = """
{%- if message.tool_calls %}{%- for tool_call in message.tool_calls %}
{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
{{- tool_call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}
"""
_QWEN_RESULT = """
{%- elif message.role == "tool" %}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
"""
QWEN25 = (
    _QWEN_TOOLS
    + """
{%- for message in messages %}
{%- if message.role == "user" or (message.role == "system" and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == "assistant" %}{%- set content = message.content %}
{{- '<|im_start|>assistant\\n' + content }}"""
    + _QWEN_CALLS
    + _QWEN_RESULT
    + """{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
"""Keeps everything."""
QWEN3 = (
    _QWEN_TOOLS
    + """
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.multi_step_tool and message.role == "user" %}
{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == "user" or (message.role == "system" and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == "assistant" %}
{%- set content = message.content %}{%- set reasoning_content = '' %}
{%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') }}
{{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}"""
    + _QWEN_CALLS
    + _QWEN_RESULT
    + """{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
)
"""Drops the thinking before the last question."""
GLM45 = """[gMASK]<sop>
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last_user_index = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ m.content }}
{%- elif m.role == 'assistant' -%}<|assistant|>
{%- set reasoning_content = '' %}{%- set content = m.content %}
{%- if '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.last_user_index and reasoning_content -%}
{{ '\\n<think>' + reasoning_content.strip() + '</think>' }}
{%- else -%}{{ '\\n<think></think>' }}{%- endif -%}
{%- if content.strip() -%}{{ '\\n' + content.strip() }}{%- endif -%}
{%- for tc in m.tool_calls or [] %}{{ '\\n<tool_call>' + tc.function.name }}
{%- for k, v in tc.function.arguments.items() %}{{ '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}
{{- v if v is string else v | tojson }}{{ '</arg_value>' }}{%- endfor %}{{ '\\n</tool_call>' }}{%- endfor %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- elif m.role == 'system' -%}<|system|>
{{ m.content }}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
"""Ends answers with the token of the next role, and drops thinking before the last question."""
LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
{%- if message.tool_calls %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- message.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
"""Trims answers, and writes tool calls in place of the text."""
MISTRAL = """{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
{%- if message.role in ('user', 'assistant') and not message.tool_calls %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set ns.index = ns.index + 1 %}{%- endif %}
{%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}{{- call.function | tojson }}{%- endfor %}{{- ']' + eos_token }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}
{%- endif %}{%- endfor %}"""
"""Refuses two answers in a row unless the first one has tool calls."""

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>", "[gMASK]", "<sop>"),
)
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens of the vocabulary that are no special tokens, as in Qwen3."""
_CORPUS = (
    "The calculator adds two numbers.\n\nI think that the answer is 42, because 40 + 2 = 42.\n",
    'user\nassistant\nsystem\n{"name": "add", "arguments": {"a": 40, "b": 2}}\n',
    "</search> <search>weather in Paris</search>\n",
    "What is the weather? It rains.\n\nHello there, how are you?\n\nThe tool said 42.\n",
)


@functools.cache
def _words() -> str:
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    words.train_from_iterator([text for text in _CORPUS for _ in range(20)], trainer)
    words.add_special_tokens(list(SPECIAL))
    words.add_tokens(list(ADDED))
    found: str = words.to_str()
    return found


def tokenizer_with(folder: Path, template: str) -> TextTokenizer:
    """A tokenizer with this chat template."""
    (folder / "tokenizer.json").write_text(_words())
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)
