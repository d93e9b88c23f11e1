"""slime's data sources: the classes from which users derive, and the adapter."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson

from asyncrl.compat.slime_sample import Sample, sample_of
from asyncrl.compat.slime_types import SlimeArgs
from asyncrl.errors import HookFailed
from asyncrl.types import NewPrompt, Prompt, ScoredGroup


class DataSource:
    """slime's base class of data sources; a class need not derive from it."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return ``num_samples`` groups of ``n_samples_per_prompt`` samples, all of one prompt."""
        raise NotImplementedError

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Take groups back that were not trained."""
        raise NotImplementedError

    def save(self, rollout_id: int) -> None:
        """Save the state after the step ``rollout_id``."""

    def load(self, rollout_id: int | None = None) -> None:
        """Load the state after the step ``rollout_id``."""

    def __len__(self) -> int:
        """Return the number of prompts."""
        return 0


class SlimeSource:
    """A ``UserSource`` of an object with ``get_samples``.

    ``add_samples`` gets groups that come back untrained, as in slime's code, and no others: slime's source with a
    buffer would serve trained groups again.  ``save`` and ``load`` keep the state in files of the object.
    """

    def __init__(self, source: Any, args: SlimeArgs) -> None:
        self._source = source
        self._size: int = args.n_samples_per_prompt
        self._takes_back = callable(getattr(source, "add_samples", None))

    @property
    def wants_finished(self) -> bool:
        """Return False."""
        return False

    @property
    def wants_returned(self) -> bool:
        """Whether the object has ``add_samples`` and has not refused a group."""
        return self._takes_back

    @property
    def fetches_singly(self) -> bool:
        """Return False: one call of ``get_samples`` gives many groups."""
        return False

    def get_samples(self, num_samples: int) -> Any:
        """Return what the object's ``get_samples`` returns."""
        return self._source.get_samples(num_samples)

    def fetch(self, count: int, first: int, /) -> list[NewPrompt]:
        """Return the prompts of up to ``count`` groups."""
        groups = self._source.get_samples(count)
        if not isinstance(groups, Sequence):
            raise HookFailed(f"get_samples must return a list of groups, got a {type(groups).__name__}")
        return [self._prompt(group, first + place) for place, group in enumerate(groups)]

    def finished(self, group: ScoredGroup, /) -> None:
        """Do nothing."""

    def give_back(self, prompt: Prompt, group: ScoredGroup | None, origin: Any, /) -> bool:
        """Call ``add_samples`` with the group that ``get_samples`` gave; False if the object refuses it.

        The samples are ABORTED and have no response; a scored group has its rewards.
        """
        samples = origin or [_sample(prompt) for _ in range(self._size)]
        for place, sample in enumerate(samples):
            sample.status = Sample.Status.ABORTED
            sample.reward = None if group is None else _reward(group, place)
        try:
            self._source.add_samples([samples])
        except (RuntimeError, NotImplementedError):  # slime's read-only sources raise it
            self._takes_back = False
        return self._takes_back

    def state(self, step: int, /) -> Any:
        """Call ``save`` with the number of the last step.  The state is in the object's own files."""
        if hasattr(self._source, "save"):
            self._source.save(step - 1)
        return None

    def load(self, step: int, state: Any, /) -> None:
        """Call ``load`` with the number of the last step."""
        if hasattr(self._source, "load"):
            self._source.load(step - 1)

    def _prompt(self, group: Any, row: int) -> NewPrompt:
        samples = list(group) if isinstance(group, Sequence) else [group]
        wrong = [sample for sample in samples if not isinstance(sample, Sample)]
        if wrong or not samples:
            given = f"a {type(wrong[0]).__name__}" if wrong else "an empty group"
            raise HookFailed(f"get_samples must return groups of asyncrl.compat.Sample, got {given}")
        if len(samples) not in (1, self._size):
            raise HookFailed(
                f"get_samples returned a group of {len(samples)} samples; --n-samples-per-prompt is {self._size}"
            )
        first = samples[0]
        if any(sample.prompt != first.prompt for sample in samples):
            raise HookFailed("get_samples returned a group of different prompts; a group has one prompt")
        samples += [copy.deepcopy(first) for _ in range(self._size - len(samples))]
        for place, sample in enumerate(samples):
            sample.group_index, sample.index = row, row * self._size + place
        return NewPrompt(
            prompt=first.prompt,
            label=first.label,
            metadata=_mapping(first.metadata, "metadata"),
            token_ids=tuple(first.tokens[: len(first.tokens) - first.response_length]),
            template_variables=_mapping(first.apply_chat_template_kwargs, "apply_chat_template_kwargs"),
            origin=samples,
        )


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise HookFailed(f"a sample's {name} must be a dict, got a {type(value).__name__}")
    return value


def _sample(prompt: Prompt) -> Sample:
    """Return a sample of a prompt that a checkpoint stored."""
    sample = sample_of(prompt)
    sample.tokens = list(prompt.token_ids)
    return sample


def _reward(group: ScoredGroup, place: int) -> Any:
    """Return the reward of the first sample that the rollout at ``place`` returned; None if it returned none."""
    return next((each.reward for each in group.samples if each.sample.rollout == place), None)


class Dataset(Protocol):
    """The prompts of ``--prompt-data``, in the order of the run, without an end."""

    position: int
    """Prompts taken so far."""

    def read(self) -> None:
        """Read the prompts now rather than when the first is wanted.  Raises DataError."""

    def sample(self, num_samples: int) -> list[list[Sample]]:
        """Return the next groups."""

    def __len__(self) -> int:
        """Return the number of prompts."""


class RolloutDataSource(DataSource):
    """slime's source of the rows of ``--prompt-data``, for classes that derive from it."""

    dataset: Dataset
    """Set by asyncrl after the class is made, if the class has not set it."""

    def __init__(self, args: SlimeArgs) -> None:
        self.args = args
        self.metadata: dict[str, Any] = {}

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next groups of the data set."""
        return self.dataset.sample(num_samples)

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Refuse: the source is read-only."""
        raise RuntimeError(f"{type(self).__name__} is read-only")

    def save(self, rollout_id: int) -> None:
        """Write the place in the data set to ``args.save``."""
        path = self._file(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps(self._to_file(), option=orjson.OPT_NON_STR_KEYS))

    def load(self, rollout_id: int | None = None) -> None:
        """Continue at the place in ``args.load``; from the beginning, if there is no file."""
        path = self._file(self.args.load, rollout_id)
        if path.is_file():
            self._from_file(orjson.loads(path.read_bytes()))

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.dataset)

    def _to_file(self) -> dict[str, Any]:
        return {"sample_offset": self.dataset.position, "metadata": self.metadata}

    def _from_file(self, found: Mapping[str, Any]) -> None:
        self.dataset.position, self.metadata = found["sample_offset"], found["metadata"]

    def _file(self, folder: Any, rollout_id: int | None) -> Path:
        return Path(folder) / "rollout" / f"data_source_{rollout_id}.json"


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The same, with a buffer of the groups that came back, which are served first.

    ``buffer_filter`` takes groups from the buffer: a method ``(args, buffer, num_samples)``, or a function
    ``(args, rollout_id, buffer, num_samples)``.  It returns them and removes them from the buffer.

    ``save`` writes the buffer as well, because its prompts are in no other part of a checkpoint.
    """

    def __init__(self, args: SlimeArgs) -> None:
        super().__init__(args)
        self.buffer: list[list[Sample]] = []

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return groups of the buffer, then of the data set."""
        groups = list(self._from_buffer(num_samples)) if self.buffer else []
        return [*groups, *super().get_samples(num_samples - len(groups))]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Keep groups in the buffer."""
        self.buffer.extend(samples)

    def buffer_filter(self, args: SlimeArgs, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
        """Take the oldest groups."""
        taken = buffer[:num_samples]
        del buffer[:num_samples]
        return taken

    def _to_file(self) -> dict[str, Any]:
        return {**super()._to_file(), "buffer": [[_stored(sample) for sample in group] for group in self.buffer]}

    def _from_file(self, found: Mapping[str, Any]) -> None:
        super()._from_file(found)
        self.buffer = [[Sample.from_dict(sample) for sample in group] for group in found.get("buffer", ())]

    def _from_buffer(self, num_samples: int) -> list[list[Sample]]:
        choose: Callable[..., list[list[Sample]]] = self.buffer_filter
        args = getattr(self, "args", None)
        before = len(self.buffer)
        if len(inspect.signature(choose).parameters) > 3:
            taken = choose(args, None, self.buffer, num_samples)
        else:
            taken = choose(args, self.buffer, num_samples)
        if taken and len(self.buffer) == before:  # the guides' method only chooses
            self.buffer = [group for group in self.buffer if all(group is not each for each in taken)]
        return taken


def _stored(sample: Sample) -> dict[str, Any]:
    """Return the attributes of a sample that are JSON values; a user may add others."""
    return {name: value for name, value in sample.to_dict().items() if _is_json(value)}


def _is_json(value: Any) -> bool:
    try:
        orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return False
    return True
