"""Chat templates with the structure of Qwen2.5, Qwen3 and GLM-4, shortened, and a tokenizer that knows their marks."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

CHATML = """
{%- if messages[0].role != 'system' %}<|im_start|>system
You are Qwen.<|im_end|>
{% endif %}
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QWEN3 = """
{%- set ns = namespace(last=messages|length - 1) %}
{%- for m in messages[::-1] %}{% if m.role == 'user' and ns.last == messages|length - 1 %}
{%- set ns.last = messages|length - 1 - loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > ns.last and '</think>' in m.content %}{{ m.content }}
{%- else %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endif %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

GLM = """[gMASK]<sop>
{%- for m in messages %}
{%- if m.role == 'tool' %}<|observation|>
<tool_response>{{ m.content }}</tool_response>
{%- elif m.role == 'assistant' %}<|assistant|>
<think></think>
{{ m.content.strip() }}
{%- else %}<|{{ m.role }}|>
{{ m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""

SPECIALS = (
    "<|im_start|>",
    "<|im_end|>",
    "[gMASK]",
    "<sop>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|system|>",
)
_WORD = re.compile("|".join((*map(re.escape, SPECIALS), "(?s:.)")))
_FIRST_SPECIAL = 0x110000


class TemplateTokenizer:
    """A token per character, and one for each of SPECIALS."""

    def __init__(self, template: str) -> None:
        self._template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)

    def encode(self, text: str) -> list[int]:
        words = _WORD.findall(text)
        return [_FIRST_SPECIAL + SPECIALS.index(each) if each in SPECIALS else ord(each) for each in words]

    def decode(self, token_ids: tuple[int, ...]) -> str:
        return "".join(SPECIALS[each - _FIRST_SPECIAL] if each >= _FIRST_SPECIAL else chr(each) for each in token_ids)

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None = None, variables: Mapping[str, Any] = {}
    ) -> str:
        return self._template.render(
            {**variables, "messages": messages, "tools": json.loads(json.dumps(tools)), "add_generation_prompt": True}
        )
