"""The outside world of a life: engines, router, trainer, network, user code, and the witness of what happens."""
