"""An agent as one writes it for any OpenAI model: it asks, calls the tools that the model wants, and asks again.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python agent.py "47*83+291"

Nothing here knows that the model is being trained.
"""

import json
import os
import re
import sys
from typing import Any

from openai import OpenAI

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Compute one product or one sum.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
MOST_TURNS = 4


def calculator(expression: str) -> str:
    found = re.fullmatch(r"(\d{1,9})([*+])(\d{1,9})", expression)
    if found is None:
        return "Error: one operation, like 12*34 or 1234+56"
    first, second = int(found[1]), int(found[3])
    return str(first * second if found[2] == "*" else first + second)


def solve(question: str, client: OpenAI, model: str = "model") -> str:
    """Return the model's answer."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MOST_TURNS):
        answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
        if not answer.tool_calls:
            return answer.content or ""
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls:
            try:
                result = calculator(**json.loads(call.function.arguments))
            except (TypeError, ValueError) as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


if __name__ == "__main__":
    sys.stdout.write(solve(sys.argv[1], OpenAI(), os.environ.get("ASYNCRL_MODEL", "model")) + "\n")
