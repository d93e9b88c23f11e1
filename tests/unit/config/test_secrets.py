"""Names that say that a value is secret, and the key of a run."""

from pathlib import Path

import pytest

from asyncrl.config import flat, resolved
from asyncrl.config.secret_names import MASK, is_secret, masked
from tests.unit.config.runs import complaints, complete, load

KEY = "sesame-of-the-run"


@pytest.mark.parametrize(
    "name", ["api-key", "hf_token", "oracle-password", "WANDB_API_KEY", "ssl-keys", "client_secret", "token"]
)
def test_a_name_of_a_secret(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["max-tokens", "total_tokens", "min-new-tokens", "multimodal-keys", "tokenizer", "key-format", "monkey"]
)
def test_a_name_of_something_else(name: str) -> None:
    assert not is_secret(name)


def test_secrets_inside_other_values_are_masked() -> None:
    given = {"judge": {"url": "http://h", "api_key": KEY}, "rows": [{"token": KEY}], "max_tokens": 5}
    assert masked(given) == {
        "judge": {"url": "http://h", "api_key": MASK},
        "rows": [{"token": MASK}],
        "max_tokens": 5,
    }


def test_the_key_of_a_run_is_kept_for_the_servers_and_written_nowhere(tmp_path: Path) -> None:
    run = load(tmp_path, "--sglang-api-key", KEY)
    assert run.sglang["api-key"] == KEY
    assert KEY not in f"{resolved(run)} {flat(run)}"
    assert "\n# sglang-api-key is secret and not written\n" in resolved(run)


@pytest.mark.parametrize("key", ["two words", "schlüssel", "tab\tulator"])
def test_a_key_that_is_no_header_is_refused_without_showing_it(key: str, tmp_path: Path) -> None:
    (line,) = complaints(*complete(tmp_path), "--sglang-api-key", key)
    assert line.startswith("--sglang-api-key must be one word of printable ASCII characters")
    assert key not in line


@pytest.mark.parametrize("flag", ["--sglang-admin-api-key", "--router-api-key", "--router-control-plane-api-keys"])
def test_a_second_key_is_refused(flag: str, tmp_path: Path) -> None:
    (line,) = complaints(*complete(tmp_path), flag, KEY)
    assert "a run has one key for engines and router" in line
    assert KEY not in line
