"""Requests that the gateway refuses: one error with a status, in the form that each kind of client reads."""

from typing import Any

import orjson

from asyncrl.errors import AsyncRLError, EngineRejected, EpisodeEnded, first_line

_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
"""Types of errors by status, named as OpenAI and Anthropic do."""
_STATUS_OF_END = {"max_turns": 403, "context_full": 400}
"""Statuses of requests past a limit; 410 if the episode is over.

403 for max-turns: strands-sglang repeats every request that ends with another status 60 times.
"""

ABORTED = "aborted"
"""Kind of the refusal of a request that its client aborted by ``POST /abort_request``."""


class RequestRefused(AsyncRLError):
    """A request that gets an error in place of an answer."""

    def __init__(self, status: int, message: str, kind: str | None = None) -> None:
        super().__init__(status, message, kind)
        self.status = status
        self.kind = kind or _KINDS.get(status, "api_error")

    def __str__(self) -> str:
        return str(self.args[1])

    def as_openai(self) -> dict[str, Any]:
        """Return the body for clients of SGLang and OpenAI."""
        error = {"message": str(self), "type": self.kind, "param": None, "code": self.status}
        return {"error": error}

    def as_anthropic(self) -> dict[str, Any]:
        """Return the body for clients of Anthropic."""
        return {"type": "error", "error": {"type": self.kind, "message": str(self)}}


def bad(message: str) -> RequestRefused:
    """Return the refusal of a request that is wrong in itself."""
    return RequestRefused(400, message)


def over(name: str) -> RequestRefused:
    """Return the refusal of a request for an episode that is over."""
    return RequestRefused(410, f"EpisodeEnded: {name}: the episode is over", "episode_ended")


def unknown() -> RequestRefused:
    """Return the refusal of a request that belongs to no open episode."""
    return RequestRefused(
        401, "no open episode has this key; send the key of the episode as API key or in the address of the gateway"
    )


def refusal_of(error: Exception) -> RequestRefused | None:
    """Return the refusal for an error that ``EpisodeSession.generate`` names, or None for any other."""
    match error:
        case EpisodeEnded():
            return RequestRefused(_STATUS_OF_END.get(error.reason, 410), _line(error), _kind(error))
        case ValueError() | EngineRejected():
            return bad(_line(error))
        case AsyncRLError():
            return RequestRefused(500, _line(error))
    return None


def _line(error: Exception) -> str:
    name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    if isinstance(error, EpisodeEnded) and error.reason == "context_full":
        return f"{name}the input is longer than the model's context length: {first_line(error)}"
    return f"{name}{first_line(error)}"


def _kind(error: EpisodeEnded) -> str:
    return "context_length_exceeded" if error.reason == "context_full" else "episode_ended"


def encoded(refusal: RequestRefused, *, is_anthropic: bool) -> bytes:
    """Return the body of the refusal."""
    return orjson.dumps(refusal.as_anthropic() if is_anthropic else refusal.as_openai())
