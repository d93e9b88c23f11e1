"""The log lines of user code, without the keys of episodes."""

import logging
import re

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_USER_OF_URL = re.compile(r"//[^/\s@]+@")


class WithoutKeys(logging.Formatter):
    """A formatter that leaves the user out of each URL: ``//KEY:SECRET@`` becomes ``//***@``.

    Clients of user code log their URL; strands-sglang does so for each episode.
    """

    def format(self, record: logging.LogRecord) -> str:
        return _USER_OF_URL.sub("//***@", super().format(record))


def log_without_keys() -> None:
    """Log to stderr, from the level INFO."""
    handler = logging.StreamHandler()
    handler.setFormatter(WithoutKeys(FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
