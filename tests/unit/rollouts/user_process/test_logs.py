"""The log lines of user code."""

import logging
import subprocess
import sys

import pytest

from asyncrl.rollouts.user_process.logs import FORMAT, WithoutKeys


@pytest.mark.parametrize(
    ("message", "logged"),
    [
        ("base_url=http://k3y:s3cret@127.0.0.1:80, timeout=1", "base_url=http://***@127.0.0.1:80, timeout=1"),
        ("POST http://k3y:[secure]@127.0.0.1/generate", "POST http://***@127.0.0.1/generate"),
        ("http://127.0.0.1/a and me@host", "http://127.0.0.1/a and me@host"),
    ],
)
def test_the_key_of_an_episode_is_not_logged(message: str, logged: str) -> None:
    record = logging.LogRecord("client", logging.INFO, "", 0, "%s", (message,), None)
    assert WithoutKeys(FORMAT).format(record).endswith(f"INFO    client: {logged}")


def test_the_root_logger_leaves_keys_out() -> None:
    code = "\n".join(
        (
            "import logging",
            "from asyncrl.rollouts.user_process.logs import log_without_keys",
            "log_without_keys()",
            "logging.info('http://k3y:s3cret@127.0.0.1')",
        )
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    assert done.stderr.endswith("root: http://***@127.0.0.1\n")
