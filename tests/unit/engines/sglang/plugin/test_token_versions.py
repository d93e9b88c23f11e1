"""The plug-in for token versions, on objects shaped like SGLang's.

The tests of the engine check the same with a real server.
"""

import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.engines.sglang.labels import STAMPS, STOOD_STILL, cache_key
from asyncrl.engines.sglang.plugin.token_versions import TokenStamps


class NoSpeculation:
    def is_none(self) -> bool:
        return True


class Streamer:
    """A streamer that records the tokens it sends, as often as SGLang's interval allows."""

    def __init__(self) -> None:
        self.sent: list[list[int]] = []

    def stream_output(self, requests: list[Any], return_logprob: bool) -> None:
        for request in requests:
            assert request.sampling_params.stream_interval == 1
            self.sent.append(request.output_ids[request.send_token_offset :])
            request.send_token_offset = len(request.output_ids)


def scheduler(*waiting: Any) -> Any:
    return SimpleNamespace(
        server_args=SimpleNamespace(weight_version="0"),
        waiting_queue=list(waiting),
        enable_overlap=False,
        output_streamer=Streamer(),
    )


def request(key: str | None = None, *, written: int = 0, sent: int = 0, is_retracted: bool = False) -> Any:
    return SimpleNamespace(
        extra_key=key,
        output_ids=list(range(written)),
        send_token_offset=sent,
        is_retracted=is_retracted,
        stream=True,
        return_logprob=True,
        sampling_params=SimpleNamespace(stream_interval=None),
    )


def passed(stamps: TokenStamps, over: Any, batch_size: int = 2) -> Any:
    """The stamps of a forward pass."""
    result = SimpleNamespace(logits_output=SimpleNamespace(customized_info=None))
    batch = SimpleNamespace(reqs=[request()] * batch_size, spec_algorithm=NoSpeculation())
    stamps.after_run_batch(result, over, batch)
    return result.logits_output.customized_info


def updated(stamps: TokenStamps, over: Any, version: str | None, *, success: bool = True) -> str:
    """The server's answer to an update."""
    answer = SimpleNamespace(success=success, message="")
    stamps.after_update(answer, SimpleNamespace(scheduler=over), SimpleNamespace(weight_version=version))
    return str(answer.message)


def test_every_token_of_a_pass_is_stamped_with_the_version_it_ran_under() -> None:
    stamps, over = TokenStamps(), scheduler()
    assert passed(stamps, over) == {STAMPS: ["0", "0"]}
    updated(stamps, over, None)  # a bucket before the last
    updated(stamps, over, "7", success=False)
    assert passed(stamps, over) == {STAMPS: ["0", "0"]}
    updated(stamps, over, "7")
    assert passed(stamps, over, 1) == {STAMPS: ["7"]}


def test_an_update_reports_the_time_since_the_last_forward_pass() -> None:
    now = [100.0]

    def later(seconds: float) -> None:
        now[0] += seconds

    stamps, over = TokenStamps(lambda: now[0]), scheduler()
    over.enable_overlap = True
    pending = [SimpleNamespace(synchronize=lambda: later(10.0)), None]
    over.result_queue = [(None, SimpleNamespace(copy_done=each)) for each in pending]
    stamps.before_pause(over, None)
    later(0.5)
    assert updated(stamps, over, None) == ""  # a bucket before the last
    assert updated(stamps, over, "1", success=False) == ""
    stamps.before_pause(over, None)  # once more, after that failure: it still stands still
    later(0.25)
    assert updated(stamps, over, "2") == f" {STOOD_STILL}10.750000"
    stamps.before_continuing(over, None)
    assert updated(stamps, over, "3") == ""


def test_waiting_requests_use_the_cache_of_the_weights_that_will_serve_them() -> None:
    ours, theirs = request(cache_key(3)), request("score/1")
    stamps, over = TokenStamps(), scheduler(ours, theirs)
    updated(stamps, over, "4")
    assert (ours.extra_key, theirs.extra_key) == (cache_key(4), "score/1")
    late = request(cache_key(3))
    stamps.before_queueing(over, late)
    assert late.extra_key == cache_key(4)


def test_a_retracted_request_sends_its_unsent_tokens_once() -> None:
    stamps, over = TokenStamps(), scheduler()
    retracted = request(cache_key(0), written=5, sent=2, is_retracted=True)
    stamps.before_queueing(over, retracted, is_retracted=True)
    stamps.before_queueing(over, retracted, is_retracted=True)
    stamps.before_queueing(over, request(written=5, sent=2))
    assert over.output_streamer.sent == [[2, 3, 4]]
    assert retracted.sampling_params.stream_interval is None


def test_an_unexpected_sglang_disables_the_stamps_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    stamps, over = TokenStamps(), scheduler()
    passed(stamps, over)
    with caplog.at_level(logging.WARNING):
        stamps.before_queueing(over, SimpleNamespace(extra_key=cache_key(0)))
        assert passed(stamps, over) is None  # a gap would shift what comes after
        updated(stamps, over, "5")
    assert len(caplog.records) == 1
    assert "is_retracted" in caplog.text


def test_the_plug_in_imports_nothing_heavy() -> None:
    code = (
        "import sys, asyncrl.engines.sglang.plugin.token_versions;"
        "assert not {'torch', 'sglang', 'aiohttp', 'ray'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


def test_an_sglang_without_the_hooked_names_is_left_unchanged() -> None:
    code = """
import sys, types
for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry"):
    sys.modules[name] = types.ModuleType(name)
registry = sys.modules["sglang.srt.plugins.hook_registry"]
registry.HookType = registry.HookRegistry = None  # using either would raise
from asyncrl.engines.sglang.plugin.token_versions import activate
activate()
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=90)
    assert done.stderr.count("this SGLang is unlike 0.5.16 inside") == 1
