"""The functions of ``--rollout-sample-hook-path``, which see each sample before its reward."""

import inspect
from collections.abc import Sequence
from typing import Any

from ..utils.misc import load_function
from ..utils.types import Sample

__all__ = ["apply_rollout_sample_hooks"]


async def apply_rollout_sample_hooks(args: Any, value: Any, **kwargs: Any) -> Any:
    """Return the sample, or the list of samples, as the hooks left it.  Raises TypeError for another result."""
    given = getattr(args, "rollout_sample_hook_path", None) or []
    paths = [given] if isinstance(given, str) else given
    if isinstance(value, list):
        return [await apply_rollout_sample_hooks(args, each, **kwargs) for each in value]
    return await _applied(args, value, paths, {"rollout_id": None, **kwargs}) if paths else value


async def _applied(args: Any, sample: Any, paths: Sequence[str], kwargs: dict[str, Any]) -> Any:
    for path in paths:
        hook = load_function(path)
        taken = inspect.signature(hook).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        found = hook(args, sample, **{name: kwargs[name] for name in kwargs if takes_all or name in taken})
        found = await found if inspect.isawaitable(found) else found
        if found is not None and not isinstance(found, Sample):
            kind = type(found).__name__
            raise TypeError(f"rollout-sample-hook-path '{path}' returned a {kind}, not a Sample or None")
        sample = sample if found is None else found
    return sample
