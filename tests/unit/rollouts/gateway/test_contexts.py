"""The tokens of texts while another request of the same episode extends its record."""

import asyncio
from pathlib import Path

import pytest

from asyncrl.data.tokenizer import TextTokenizer
from asyncrl.rollouts.gateway.contexts import Context, Encoder, TextContexts
from asyncrl.rollouts.record import TokenIds, TokenRecord
from asyncrl.types import Prompt
from tests.unit.rollouts.gateway.templates import QWEN25, tokenizer_with
from tests.unit.rollouts.turns import turn_of

PROMPT, ANSWER, OBSERVED = "Hello there", " I think that.<|im_end|>", "\n\nThe tool said 42."


class WaitingEncoder(Encoder):
    """An encoder that waits for ``gate`` as if its thread were busy."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        super().__init__(tokenizer)
        self.began, self.gate = asyncio.Event(), asyncio.Event()

    async def encode(self, text: str) -> TokenIds:
        """See ``Encoder``."""
        self.began.set()
        await self.gate.wait()
        return await super().encode(text)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(f"{PROMPT}{ANSWER}{OBSERVED}{ANSWER} And you?", id="behind the whole record"),
        pytest.param(f"{PROMPT} I thi", id="within a turn"),
        pytest.param(f"{PROMPT}, dear all", id="behind the prompt"),
        pytest.param(f"{PROMPT}{ANSWER}\n\nThe tool failed.", id="within an observation"),
        pytest.param("Another prompt", id="without the prompt"),
    ],
)
def test_a_request_that_extends_the_record_meanwhile_changes_no_tokens(tmp_path: Path, text: str) -> None:
    tokenizer = tokenizer_with(tmp_path, QWEN25)

    def ids(of: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(of))

    async def main() -> Context:
        record, encoder = TokenRecord(), WaitingEncoder(tokenizer)
        contexts = TextContexts(encoder, Prompt(row=0, epoch=0, text=PROMPT, token_ids=ids(PROMPT), label=""), record)
        line = record.add(ids(PROMPT), turn_of(0, ids(ANSWER)))
        record.add(tuple(line.ids) + ids(OBSERVED), turn_of(1, ids(ANSWER)))
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            finding = tasks.create_task(contexts.context(text))
            await encoder.began.wait()
            record.add(tuple(line.ids) + ids(" The weather"), turn_of(2, ids(ANSWER)))
            encoder.gate.set()
        return finding.result()

    assert tokenizer.decode(tuple(asyncio.run(main()).token_ids)) == text
