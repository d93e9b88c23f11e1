"""The plug-ins that an engine reports, and the run's warning about missing ones."""

import asyncio
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import orjson
import pytest

from asyncrl.app.assembly import _record_plugins
from asyncrl.engines.cluster.servers import Servers
from asyncrl.engines.cluster.settings import Deployment
from asyncrl.engines.sglang.client.control import EngineControl
from asyncrl.engines.sglang.installed_plugins import EnginePlugins, missing_warning, read_plugins, start_hint
from asyncrl.engines.sglang.labels import PLUGINS
from asyncrl.engines.sglang.plugin import activation, direct, memory_saver, token_versions
from asyncrl.errors import EngineRejected, ServerFailed

ALL = EnginePlugins(active=("direct", "memory_saver", "stamps"), refusals={})
NONE = EnginePlugins(refusals={})
UNLIKE = EnginePlugins(active=("direct", "memory_saver"), refusals={"stamps": "no run_batch"})


def answered(*notes: dict[str, str | None]) -> dict[str, Any]:
    return {"version": "0.5.16", "internal_states": [{"max_running_requests": 9, PLUGINS: each} for each in notes]}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (answered({"direct": None, "memory_saver": None, "stamps": None}), ALL),
        (answered({"direct": None, "memory_saver": None, "stamps": "no run_batch"}), UNLIKE),
        (answered({"direct": None, "stamps": None}, {"direct": None}), EnginePlugins(active=("direct",), refusals={})),
        ({"internal_states": [{"max_running_requests": 9}]}, NONE),
        ({"internal_states": []}, NONE),
        ({}, NONE),
        (None, NONE),
    ],
    ids=["all", "one refused", "two schedulers", "stock", "no scheduler", "another server", "no JSON"],
)
def test_the_answer_of_an_engine_names_its_plug_ins(answer: Any, said: EnginePlugins) -> None:
    class Http:
        async def look(self, url: str, timeout_s: float) -> Any:
            assert url == "http://engine/server_info"
            return answer

    assert read_plugins(answer) == said
    control = EngineControl(Http(), "http://engine", timeout_s=1.0)  # type: ignore[arg-type]
    assert asyncio.run(control.plugins()) == said


def test_engines_with_every_needed_plug_in_give_no_warning() -> None:
    assert missing_warning({"sglang-0": ALL, "sglang-1": ALL}, ("stamps", "direct", "memory_saver")) is None
    assert missing_warning({"sglang-0": UNLIKE}, ("direct",)) is None


def test_one_warning_names_the_engines_the_loss_and_the_remedy() -> None:
    said = missing_warning({"sglang-0": NONE, "sglang-1": ALL, "sglang-2": NONE}, ("stamps", "direct"))
    assert said is not None
    assert "asyncrl_stamps is not in sglang-0, sglang-2: weight versions are known per chunk" in said
    assert "asyncrl_direct is not in sglang-0, sglang-2: weight updates take two to three times as long" in said
    assert said.endswith("PYTHONPATH; SGLANG_PLUGINS, where it is set, must name them")
    assert said.count("install asyncrl") == 1
    assert "memory_saver" not in said


def test_a_plug_in_that_refused_is_named_with_its_reason() -> None:
    said = missing_warning({"sglang-0": UNLIKE}, ("stamps", "direct"))
    assert said is not None
    assert "asyncrl_stamps is not active in sglang-0 (no run_batch): " in said
    assert "install asyncrl" not in said


def test_the_error_of_a_failed_start_names_a_missing_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "asyncrl_cpu, asyncrl_stamps")
    hint = start_hint("memory_saver")
    assert hint is not None
    assert hint.startswith("the plug-in asyncrl_memory_saver of SGLang is not there: install asyncrl")

    async def dies() -> Any:
        raise ServerFailed("sglang-0 ended with code 1: no graphs")

    def failure(plugins: tuple[str, ...]) -> str:
        servers: Any = SimpleNamespace(_deployment=SimpleNamespace(needed_plugins=plugins))
        with pytest.raises(ServerFailed) as error:
            asyncio.run(Servers._first_start(servers, dies))  # noqa: SLF001
        return str(error.value)

    assert failure(("stamps",)) == "sglang-0 ended with code 1: no graphs"
    assert failure(("stamps", "memory_saver")) == f"sglang-0 ended with code 1: no graphs; --colocate: {hint}"


def test_a_run_needs_the_plug_ins_that_it_uses() -> None:
    def needed(*, colocate: bool, device: str = "cuda", **others: Any) -> object:
        deployment = SimpleNamespace(
            cluster=SimpleNamespace(colocate=colocate),
            trainer=SimpleNamespace(device=device),
            **{"disk": None, "routes": None, "has_trainer": True, **others},
        )
        return Deployment.needed_plugins.fget(deployment)  # type: ignore[attr-defined]

    assert needed(colocate=False) == ("stamps", "direct")
    assert needed(colocate=False, routes="some") == ("stamps", "routes", "direct")
    assert needed(colocate=False, disk=Path("disk")) == ("stamps",)
    assert needed(colocate=False, has_trainer=False) == ("stamps",)
    assert needed(colocate=True, device="cuda") == ("stamps", "memory_saver")
    assert needed(colocate=True, device="cpu") == ("stamps",)


def test_a_run_continues_when_an_engine_cannot_name_its_plug_ins(caplog: pytest.LogCaptureFixture) -> None:
    async def refuses() -> None:
        raise EngineRejected("404")

    control: Any = SimpleNamespace(plugins=refuses)
    servers: Any = SimpleNamespace()
    server: Any = SimpleNamespace(name="sglang-0")
    asking = Servers._plugins_of(servers, server, control)  # noqa: SLF001
    assert asyncio.run(asking) is None
    assert "sglang-0 did not say which plug-ins of asyncrl it has: 404" in caplog.text


def test_the_run_directory_records_the_plug_ins_of_each_engine(tmp_path: Path) -> None:
    path = tmp_path / "versions.json"
    path.write_text('{"sglang": "0.5.16"}')
    running: Any = SimpleNamespace(plugins={"sglang-1": UNLIKE, "sglang-0": NONE, "sglang-2": None})
    _record_plugins(path, running)
    assert orjson.loads(path.read_bytes()) == {
        "sglang": "0.5.16",
        "plugins": {
            "sglang-0": {},
            "sglang-1": {"direct": "active", "memory_saver": "active", "stamps": "no run_batch"},
            "sglang-2": None,
        },
    }


def test_a_run_continues_when_the_record_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    running: Any = SimpleNamespace(plugins={"sglang-0": ALL})
    _record_plugins(tmp_path / "gone.json", running)
    assert "plug-ins were not written" in caplog.text


@pytest.fixture
def unlike_sglang(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The hooks registered in an SGLang that lacks everything we hook but the scheduler's answer about its state."""
    hooks: dict[str, Any] = {}
    names = ["", ".srt", ".srt.plugins", ".srt.plugins.hook_registry", ".srt.managers", ".srt.managers.scheduler"]
    for name in names:
        module = ModuleType(f"sglang{name}")
        module.__path__ = []
        monkeypatch.setitem(sys.modules, f"sglang{name}", module)
    for name in names[1:]:
        parent, _, child = f"sglang{name}".rpartition(".")
        setattr(sys.modules[parent], child, sys.modules[f"sglang{name}"])
    registry: Any = sys.modules["sglang.srt.plugins.hook_registry"]
    registry.HookType = SimpleNamespace(AFTER="after")
    registry.HookRegistry = SimpleNamespace(register=lambda target, hook, kind: hooks.update({target: hook}))
    scheduler: Any = sys.modules["sglang.srt.managers.scheduler"]
    scheduler.Scheduler = SimpleNamespace(get_internal_state=lambda self, recv_req: None)
    monkeypatch.setattr(activation, "_notes", {})
    return hooks


def test_a_plug_in_that_finds_nothing_to_hook_reports_why_in_the_servers_answer(
    unlike_sglang: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for plugin in (direct, memory_saver, token_versions):
            plugin.activate()
    assert list(unlike_sglang) == ["sglang.srt.managers.scheduler.Scheduler.get_internal_state"]
    result = SimpleNamespace(internal_state={"max_running_requests": 9})
    assert unlike_sglang.popitem()[1](result, None, None) is None
    said = read_plugins({"internal_states": [result.internal_state]})
    assert said.active == ("memory_saver",)
    assert said.refusals.keys() == {"direct", "stamps"}
    assert all("this SGLang is unlike 0.5.16 inside" in why for why in said.refusals.values())
