"""The address of the page."""

LOOPBACK = "127.0.0.1"
"""The address to listen on: other machines reach it through a tunnel of ssh alone."""


def url_of(port: int, key: str) -> str:
    """Return the address of the page on ``port``, with its key."""
    return f"http://{LOOPBACK}:{port}/?key={key}"
