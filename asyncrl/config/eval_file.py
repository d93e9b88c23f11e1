"""The file of ``--eval-config``: named sets of held-out prompts, each with settings that override the flags.

slime's form in YAML, or the same tables in TOML:

    eval:
      defaults: {top_p: 0.7}
      datasets:
        - {name: aime, path: aime.jsonl, rm_type: number, n_samples_per_eval_prompt: 16}
"""

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.areas.evaluation import EvalEntry
from asyncrl.config.areas.ranges import refuse
from asyncrl.config.knobs import Knob, knobs
from asyncrl.config.values import UNREADABLE, WrongValue, absolute, from_flag, from_toml, shown, unreadable
from asyncrl.errors import ConfigError

KEYS: Mapping[str, str] = {
    "n_samples_per_eval_prompt": "n-samples-per-eval-prompt",
    "temperature": "eval-temperature",
    "top_p": "eval-top-p",
    "top_k": "eval-top-k",
    "repetition_penalty": "eval-repetition-penalty",
    "max_response_len": "eval-max-response-len",
    "min_new_tokens": "eval-min-new-tokens",
    "max_prompt_len": "eval-max-prompt-len",
    "stop": "rollout-stop",
    "stop_token_ids": "rollout-stop-token-ids",
    "pass_threshold": "eval-pass-threshold",
    "rm_type": "rm-type",
    "custom_rm_path": "custom-rm-path",
    "reward_key": "reward-key",
    "input_key": "input-key",
    "label_key": "label-key",
    "tool_key": "tool-key",
    "metadata_key": "metadata-key",
    "apply_chat_template": "apply-chat-template",
    "apply_chat_template_kwargs": "apply-chat-template-kwargs",
}
"""The keys of a set, each with the setting whose type, choices and meaning it has."""
METADATA = "metadata_overrides"
"""The key of a table that is merged into the metadata of every row."""

_NO_REFERENCE = "must be a plain value, got {}: references such as ${{oc.env:HOME}} are not resolved; write it out"
_UNUSED = "slime reads this key and does nothing with it; leave it out"
REFUSED: Mapping[str, str] = {
    "multimodal_keys": "not supported: prompts are text",
    "custom_generate_function_path": "not supported per set: evaluations run the function of training",
    "skip_special_tokens": "not supported per set: all responses are decoded alike",
    "no_stop_trim": "not supported: the text of a response keeps its stop string; leave it out, or give true",
    "app_service": _UNUSED,
    "eval_task_timeout": _UNUSED,
    "min_eval_samples": _UNUSED,
    "eval_early_stop_remaining": _UNUSED,
    "eval_early_stop_idle_timeout": _UNUSED,
    "message_processor": _UNUSED,
    "reward_model": _UNUSED,
    "remote_environment": _UNUSED,
}
"""The keys of slime that a set cannot have, each with the reason."""


def read_eval_file(path: Path) -> tuple[EvalEntry, ...]:
    """Return the sets of the file.  Relative paths in it are relative to its folder.

    Raises ConfigError with one line per mistake.
    """
    table = _table(path)
    table = table.get("eval", table) if isinstance(table, dict) else table
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: must have a table eval with datasets, got {_brief(table)}")
    reader = _Reader(path)
    entries = reader.entries(table)
    refuse(reader.mistakes)
    return entries


class _Reader:
    """Converts the tables of one file, and notes every mistake."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = path.absolute().parent
        self.mistakes: list[str] = []

    def entries(self, table: Mapping[str, Any]) -> tuple[EvalEntry, ...]:
        self._refuse_unknown(str(self._path), table, ("defaults", "datasets"))
        defaults = self._inner(f"{self._path}: defaults", table.get("defaults"))
        shared = self._settings(f"{self._path}: defaults", defaults)
        entries = [self._entry(given, defaults, shared) for given in self._sets(table.get("datasets"))]
        names = [entry.name for entry in entries]
        twins = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        self.mistakes += [f"{self._path}: two sets have the name {name}" for name in twins]
        return tuple(entries)

    def _sets(self, given: Any) -> list[Mapping[str, Any]]:
        """Return the tables of the sets: a list, or a table whose keys are the sets' names."""
        if isinstance(given, dict) and all(isinstance(table, dict | None) for table in given.values()):
            given = [{"name": name, **(table or {})} for name, table in given.items()]
        if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
            self.mistakes.append(f"{self._path}: datasets must be a list of tables, each with a name and a path")
            return []
        return given

    def _entry(self, given: Mapping[str, Any], defaults: Mapping[str, Any], shared: Mapping[str, Any]) -> EvalEntry:
        name, file = given.get("name"), given.get("path", defaults.get("path"))
        if not isinstance(name, str) or not name or not isinstance(file, str) or not file:
            self.mistakes.append(f"{self._path}: every set needs a name and a path, got {_brief(given)}")
            name, file = str(name), "."
        if not name.isprintable():
            self.mistakes.append(f"{self._path}: the name of a set must be printable text, got {name!a}")
        where = f"{self._path}: {name}"
        if "${" in file:
            self.mistakes.append(f"{where}: path {_NO_REFERENCE.format(shown(file))}")
        return EvalEntry(
            name=name,
            path=self._located(where, file),
            settings={**shared, **self._settings(where, given)},
            metadata=self._inner(f"{where}: {METADATA}", given.get(METADATA, defaults.get(METADATA))),
        )

    def _located(self, where: str, file: str) -> Path:
        try:
            return absolute(file, self._folder)
        except WrongValue as error:
            self.mistakes.append(f"{where}: path {error}")
            return self._folder

    def _inner(self, where: str, given: Any) -> dict[str, Any]:
        if given is None or isinstance(given, dict):
            return given or {}
        self.mistakes.append(f"{where} must be a table, got {_brief(given)}")
        return {}

    def _settings(self, where: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the converted values; a null is not given."""
        self._refuse_unknown(where, given, ("name", "path", METADATA, *KEYS))
        settings = {}
        for key, value in given.items():
            if key not in KEYS or value is None:
                continue
            try:
                settings[key] = _value(key, value, self._folder)
            except WrongValue as error:
                self.mistakes.append(f"{where}: {key} {error}")
        return settings

    def _refuse_unknown(self, where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
        for key, value in given.items():
            if key in known or (key in REFUSED and (value is None or (key, value) == ("no_stop_trim", True))):
                continue
            guess = difflib.get_close_matches(str(key).replace("-", "_"), known, n=1, cutoff=0.6)
            hint = f"; did you mean {guess[0]}?" if guess else f"; known are {', '.join(known)}"
            reason = f"{key}: {REFUSED[key]}" if key in REFUSED else f"unknown key {key}{hint}"
            self.mistakes.append(f"{where}: {reason}")


def _value(key: str, value: Any, folder: Path) -> Any:
    knob: Knob | None = knobs().get(KEYS[key])
    if knob is None:
        raise WrongValue("is not supported yet; leave it out")
    if isinstance(value, str) and "${" in value:
        raise WrongValue(_NO_REFERENCE.format(shown(value)))
    if knob.is_many and not isinstance(value, list):
        value = [value]
    if isinstance(value, dict) and knob.type is str:
        value = _json(value)
    is_text_of_number = isinstance(value, str) and knob.type in (int, float)  # 1e-3 is text in YAML
    return from_flag(knob, value, folder) if is_text_of_number else from_toml(knob, value, folder)


def _json(value: Mapping[Any, Any]) -> str:
    """The table as JSON text; a date, which YAML has, becomes text."""
    try:
        return json.dumps(value, default=str)
    except TypeError:
        raise WrongValue(f"must have keys that are text, got {_brief(value)}") from None


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _table(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text) if path.suffix == ".toml" else _yaml(path, text)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"eval-config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text; save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    except UNREADABLE as error:
        raise ConfigError(f"{path}: {unreadable(error)}") from error


def _yaml(path: Path, text: str) -> Any:
    import yaml  # most runs have no such file

    try:
        _refuse_twins(path, yaml.compose(text, yaml.SafeLoader))
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not YAML: {getattr(error, 'problem', None) or error}") from error


def _refuse_twins(path: Path, node: Any) -> None:
    """Raise ConfigError if a table of the YAML tree ``node`` has a key twice, of which PyYAML would keep the last."""
    children = getattr(node, "value", None)
    if not isinstance(children, list):
        return
    pairs = [child for child in children if isinstance(child, tuple)]
    seen: set[str] = set()
    for key, _ in pairs:
        if str(key.value) in seen:
            raise ConfigError(f"{path}:{key.start_mark.line + 1}: the key {key.value} is given twice")
        seen.add(str(key.value))
    for child in [value for _, value in pairs] or children:
        _refuse_twins(path, child)
