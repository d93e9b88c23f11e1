"""The checks of flags that are accepted without a setting: the run must do what they ask for."""

from collections.abc import Callable, Mapping

from asyncrl.config.areas import FlagWords, RunConfig
from asyncrl.config.areas.ranges import must
from asyncrl.config.slime.status import Kind
from asyncrl.config.slime.table import TABLE


def asked_for(foreign: Mapping[str, FlagWords]) -> dict[str, FlagWords]:
    """The flags that are not turned off with false.  A flag that takes a value has the text false.

    A flag that is true anyway stays false, which ``unlike`` reports.
    """
    found: dict[str, FlagWords] = {
        name: "false" if words is False and TABLE[name].words != "none" else words for name, words in foreign.items()
    }
    return {name: words for name, words in found.items() if words is not False or TABLE[name].kind is Kind.TRUE_ANYWAY}


def unlike(run: RunConfig) -> list[str]:
    """One line for each flag of ``run.foreign`` that asks for something else than the run does.

    ``models.overrides`` compares the flags that describe the model.
    """
    return [line for name, value in run.foreign.items() for line in _value(name, value) + _condition(run, name, value)]


def written(name: str, value: FlagWords) -> str:
    """The flag as on a command line, for notes and error lines."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--{name} false"
    return f"--{name} {value if isinstance(value, str) else ' '.join(value)}"


def _value(name: str, value: FlagWords) -> list[str]:
    row = TABLE[name]
    if value is False:
        return [f"{written(name, value)}: {row.text}; leave it out"]
    if row.words == "none":
        return must(value is True, f"{written(name, value)}: takes no value; give --{name} alone")
    if row.words == "one" and not isinstance(value, str):
        return [f"{written(name, value)}: must have one value"]
    if row.kind is not Kind.TRUE_ANYWAY or not row.accepted:
        return []
    return must(
        any(is_same(str(value), one) for one in row.accepted),
        f"{written(name, value)}: {row.text}; leave it out or give {' or '.join(row.accepted)}",
    )


def is_same(given: str, wanted: str) -> bool:
    """Whether two values are equal as numbers, or as text."""
    try:
        return float(given) == float(wanted)
    except ValueError:
        return given == wanted


def _condition(run: RunConfig, name: str, value: FlagWords) -> list[str]:
    return _CONDITIONS[name](run, value) if name in _CONDITIONS and value is not False else []


def _moved(run: RunConfig, name: str) -> list[str]:
    return must(
        run.cluster.colocate,
        f"--{name} without colocate: trainer and engines keep their GPUs; leave it out or give colocate",
    )


def _kept(run: RunConfig, name: str) -> list[str]:
    return must(
        not run.cluster.colocate,
        f"--{name} with colocate, which moves both sides to host memory in turn; leave out --{name}",
    )


def _bf16(run: RunConfig, value: FlagWords) -> list[str]:
    return must(run.model.dtype != "float32", "--bf16 with dtype float32; leave one of them out")


def _loss(run: RunConfig, value: FlagWords) -> list[str]:
    has_function = run.train.custom_loss_function_path is not None
    if value == "custom_loss":
        return must(
            has_function, "--loss-type custom_loss without custom-loss-function-path; give the function of the loss"
        )
    return must(
        not has_function, "--loss-type policy_loss with custom-loss-function-path, which replaces it; leave one out"
    )


def _backend(run: RunConfig, value: FlagWords) -> list[str]:
    return must(
        run.cluster.device != "cpu", "--distributed-backend nccl with device cpu, where ranks use gloo; leave it out"
    )


def _restarts(run: RunConfig, value: FlagWords) -> list[str]:
    return must(
        run.failures.max_engine_restarts != 0,
        "--use-fault-tolerance with max-engine-restarts 0: no engine restarts; leave one of them out",
    )


_CONDITIONS: Mapping[str, Callable[[RunConfig, FlagWords], list[str]]] = {
    "offload": lambda run, _: _moved(run, "offload"),
    "offload-train": lambda run, _: _moved(run, "offload-train"),
    "offload-rollout": lambda run, _: _moved(run, "offload-rollout"),
    "no-offload-train": lambda run, _: _kept(run, "no-offload-train"),
    "no-offload-rollout": lambda run, _: _kept(run, "no-offload-rollout"),
    "bf16": _bf16,
    "loss-type": _loss,
    "distributed-backend": _backend,
    "use-fault-tolerance": _restarts,
}
"""The further conditions under which a flag is true anyway."""
