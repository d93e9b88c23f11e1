"""A process that finds tool calls and reasoning in answers with SGLang's parsers.

    python -m asyncrl.engines.sglang.answer_parser TOOL_CALL_PARSER REASONING_PARSER

Reads requests from the standard input, one line of JSON each, and answers each with a line.  A parser whose name is
empty is not used.
"""

import sys
from typing import Any, TextIO

import orjson


def main(tool_call_parser: str, reasoning_parser: str, requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are no more."""
    parser = _Parser(tool_call_parser, reasoning_parser)
    for line in requests:
        answers.write(orjson.dumps(parser.answer(orjson.loads(line))).decode() + "\n")
        answers.flush()


class _Parser:
    def __init__(self, tool_call_parser: str, reasoning_parser: str) -> None:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        self._tool = Tool
        self._calls = FunctionCallParser
        self._reasoning = ReasoningParser
        self._tool_call_parser = tool_call_parser
        self._reasoning_parser = reasoning_parser
        if tool_call_parser:
            FunctionCallParser([], tool_call_parser)  # raises ValueError for an unknown name
        if reasoning_parser:
            ReasoningParser(reasoning_parser, stream_reasoning=False)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._parsed(request["text"], request["prompt_end"], request["tools"])
        except Exception as error:  # noqa: BLE001 (the parsers raise what Python raises on texts that they do not expect)
            return {"error": f"{type(error).__name__}: {error}"}

    def _parsed(self, text: str, prompt_end: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
        reasoning: str | None = None
        if self._reasoning_parser:
            reasoning, text = self._split(text, prompt_end)
        calls: list[dict[str, str]] = []
        if self._tool_call_parser and tools:
            parser = self._calls([self._tool(**tool) for tool in tools], self._tool_call_parser)
            rest, found = parser.parse_non_stream(text) if parser.has_tool_call(text) else (text, [])
            if found:  # a call that is not valid stays in the text: SGLang drops it, and the agent would see nothing
                text, calls = rest, [{"name": call.name, "arguments": call.parameters} for call in found]
        return {"content": text or "", "reasoning": reasoning, "calls": calls}

    def _split(self, text: str, prompt_end: str) -> tuple[str | None, str]:
        """Return reasoning and the rest; the prompt may have opened the reasoning, or closed it already."""
        detector = self._reasoning(self._reasoning_parser, stream_reasoning=False).detector
        opened = prompt_end.rfind(detector.think_start_token)
        is_open = opened > prompt_end.rfind(detector.think_end_token)
        parser = self._reasoning(self._reasoning_parser, stream_reasoning=False, force_reasoning=is_open)
        return parser.parse_non_stream(text)  # type: ignore[no-any-return]


if __name__ == "__main__":
    # Whatever SGLang prints while it is imported must not get between the answers.
    lines, sys.stdout = sys.stdout, sys.stderr
    main(sys.argv[1], sys.argv[2], sys.stdin, lines)
