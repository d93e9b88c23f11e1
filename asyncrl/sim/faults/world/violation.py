"""The error of an oracle."""


class Violation(AssertionError):
    """An oracle that does not hold; ``oracle`` is its name."""

    def __init__(self, oracle: str, text: str) -> None:
        super().__init__(f"{oracle}: {text}")
        self.oracle = oracle
