"""The tokens of texts while another request of the same episode extends its record."""

import asyncio
import json
from pathlib import Path

import pytest

from asyncrl.data.tokenizer import TextTokenizer, load_tokenizer
from asyncrl.rollouts.gateway.contexts import Context, Encoder, TextContexts
from asyncrl.rollouts.record import Line, TokenIds, TokenRecord
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


@pytest.mark.parametrize(
    ("prompt", "observed"),
    [
        pytest.param("Un cafe\u0301?", "\n\nThe tool said 42.", id="prompt"),
        pytest.param("Hello there", "\n\nUn cafe\u0301.", id="observation"),
    ],
)
def test_the_models_tokens_stay_behind_text_that_the_tokenizer_normalises(
    tmp_path: Path, prompt: str, observed: str
) -> None:
    # Qwen's tokenizers compose characters (NFC), so that decoded text is another than the client's.
    tokenizer_with(tmp_path, QWEN25)
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(made | {"normalizer": {"type": "NFC"}}))
    tokenizer = load_tokenizer(tmp_path)
    prompt_ids = tuple(tokenizer.encode(prompt))
    assert tokenizer.decode(prompt_ids) + tokenizer.decode(tuple(tokenizer.encode(observed))) != prompt + observed
    drawn = tuple(token for letter in " I think that." for token in tokenizer.encode(letter))
    assert list(drawn) != tokenizer.encode(" I think that.")

    async def main() -> tuple[Line, Context]:
        record = TokenRecord()
        task = Prompt(row=0, epoch=0, text=prompt, token_ids=prompt_ids, label="")
        contexts = TextContexts(Encoder(tokenizer), task, record)
        text = prompt
        for call in range(3):
            context = await contexts.context(text)
            record.add(context.token_ids, turn_of(call, drawn))
            text += tokenizer.decode(drawn) + observed
        assert contexts.longest_match(text) == len(text) - len(observed)
        return record.lines[0], await contexts.context(text)

    line, context = asyncio.run(main())
    assert context.token_ids[: line.num_tokens] == line.ids
    assert len(line.turns) == 3
