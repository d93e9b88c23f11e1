"""The reward for an answer that follows every instruction of its prompt (IFEval, Zhou et al. 2023, strict accuracy)."""

from collections.abc import Mapping
from typing import Any

from asyncrl.errors import RewardFailed
from asyncrl.rewards.graders.instructions import INSTRUCTIONS


def follows_all(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """Return 1.0 if the answer follows all of ``metadata["instruction_id_list"]``, else 0.0.

    ``metadata["kwargs"]`` is a list with the arguments of each instruction, or one object for all.  Entries that are
    None do not count as given.  ``metadata["prompt_text"]`` is the prompt, for instructions that repeat it.  An empty
    answer follows nothing.  Raises RewardFailed for an unknown instruction, and for a missing argument.
    """
    ids = [str(each).strip() for each in metadata.get("instruction_id_list") or () if each is not None]
    if not ids:
        raise RewardFailed("the row's metadata has no instruction_id_list")
    unknown = [each for each in ids if each not in INSTRUCTIONS]
    if unknown:
        raise RewardFailed(f"unknown instruction {unknown[0]!r}; the known ones are {', '.join(sorted(INSTRUCTIONS))}")
    given = _arguments(metadata.get("kwargs"), len(ids))
    prompt = metadata.get("prompt_text") or metadata.get("prompt")
    verdicts = [_follows(name, response, {"prompt": prompt, **each}) for name, each in zip(ids, given, strict=True)]
    return float(bool(response.strip()) and all(verdicts))


def _follows(name: str, response: str, given: dict[str, Any]) -> bool:
    try:
        return INSTRUCTIONS[name](response, given)
    except KeyError as error:
        raise RewardFailed(f"the instruction {name} needs {error.args[0]!r} in the row's kwargs") from None


def _arguments(given: Any, count: int) -> list[dict[str, Any]]:
    """Return the arguments of each instruction, without entries that are None; missing ones are empty."""
    entries = [given] * count if isinstance(given, Mapping) else list(given or ())[:count]
    entries += [{}] * (count - len(entries))
    return [{key: value for key, value in (entry or {}).items() if value is not None} for entry in entries]
