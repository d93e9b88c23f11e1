"""A simulated SGLang server: tokens that a pure function gives, its commands, and its ways to fail.

Token i of an answer depends on the request's seed and i alone.  Its log-prob depends on the weights that the engine
held, so that a trained token shows which weights generated it, whatever its version says.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import orjson

from asyncrl.engines.fake import fake_logprob
from asyncrl.engines.sglang.labels import RECORDED, STAMPS, STOOD_STILL
from asyncrl.engines.weight_sync.path_check import MET, PATH_CHECK
from asyncrl.event_loop import loop_time
from asyncrl.sim.faults.world.collective import Collectives
from asyncrl.sim.faults.world.network import Connection, Network, Reply
from asyncrl.sim.faults.world.plan import Setting
from asyncrl.sim.faults.world.tokens import MIXED, PROMPT_TOKENS, STOP, UNKNOWN, length_of, token_of
from asyncrl.sim.faults.world.violation import Violation


class _Call:
    """A request that the engine answers."""

    __slots__ = ("before", "connection", "left", "limit", "paid_s", "pending", "place", "rid", "seed", "sent", "timer")

    def __init__(self, connection: Connection, body: dict[str, Any], longest: int) -> None:
        ids, sampling = body["input_ids"], body["sampling_params"]
        self.connection = connection
        self.rid: str = body["rid"]
        self.seed: int = sampling["sampling_seed"]
        self.place = len(ids) - PROMPT_TOKENS
        self.before: int = ids[-1]
        self.left: int = max(1, length_of(self.seed, longest) - self.place)
        self.limit: int = sampling["max_new_tokens"]
        self.sent = 0
        self.pending = list[tuple[float, int, int, str]]()
        """Log-prob, token, step and label of tokens that are not sent yet."""
        self.paid_s = 0.0
        self.timer: asyncio.TimerHandle | None = None


class SimEngine:
    """One engine process after the other at one place of the run."""

    def __init__(
        self, number: int, setting: Setting, network: Network, collectives: Collectives, note: Callable[[str], None]
    ) -> None:
        self.number = number
        self.is_up = False
        self.step = MIXED
        self.label = "default"
        self._setting = setting
        self._network = network
        self._weather = network.weather
        self._collectives = collectives
        self._note = note
        self._is_paused = False
        self._calls = dict[Connection, _Call]()
        self._waiting = list[Callable[[], None]]()
        self._num_buckets = 0
        self._records = False
        self._paused_at = 0.0
        self._starts = 0
        self.netloc = f"10.0.0.{number}:30000"
        self.on_death: Callable[[], None] = lambda: None

    @property
    def url(self) -> str:
        """The engine's present URL."""
        return f"http://{self.netloc}"

    @property
    def num_requests(self) -> int:
        """Requests that the engine answers now."""
        return len(self._calls)

    # ---- the process

    def start(self) -> None:
        """Start a process with weights from the disk of models, which no run has trained."""
        if self._starts:
            self._network.hosts.pop(self.netloc, None)
            self.netloc = f"10.0.0.{self.number}:{30000 + self._starts}"
        self._starts += 1
        self.is_up, self._is_paused, self._records = True, False, False
        self.step, self.label = MIXED, "default"
        self._network.hosts[self.netloc] = self
        self._weather.numbers[self.netloc] = self.number

    def die(self) -> None:
        """End the process; its connections break."""
        if not self.is_up:
            return
        self.is_up = False
        calls, self._calls = self._calls, {}
        for call in calls.values():
            _stop(call)
            if call.connection not in self._network.connections:  # a router's
                call.connection.lose(ConnectionResetError("the engine has died"))
        self._waiting.clear()
        self._collectives.leave(self.number)
        self._network.reset(self.netloc)
        self.on_death()

    # ---- Host

    def stream(self, connection: Connection, body: dict[str, Any]) -> None:
        """See ``Host.stream``."""
        if (hung_s := self._hung_s()) > 0:
            asyncio.get_running_loop().call_later(hung_s, self._stream_if_up, connection, body, self._starts)
            return
        call = self._calls[connection] = _Call(connection, body, self._setting.longest)
        if not self._is_paused:
            self._plan(call)

    def _stream_if_up(self, connection: Connection, body: dict[str, Any], start: int) -> None:
        if self.is_up and self._starts == start and not connection.is_closing():
            self.stream(connection, body)

    def closed(self, connection: Connection) -> None:
        """See ``Host.closed``."""
        if self._setting.aborts_on_disconnect and (call := self._calls.pop(connection, None)) is not None:
            _stop(call)

    def command(self, method: str, path: str, body: dict[str, Any], reply: Reply) -> None:
        """See ``Host.command``."""
        if (hung_s := self._hung_s()) > 0:
            start = self._starts

            def again() -> None:
                if self.is_up and self._starts == start:
                    self.command(method, path, body, reply)

            asyncio.get_running_loop().call_later(hung_s, again)
            return
        status = None if method == "GET" else self._weather.refusal(self.netloc)
        if status is not None:
            reply(status, {"error": "simulated"})
            return
        name = path[1:]
        self._note(f"engine {self.number}: {name}")
        answer = getattr(self, f"_do_{name}", None)
        if answer is None:
            reply(200, {})
        else:
            answer(body, reply)

    # ---- commands

    def _do_generate(self, body: dict[str, Any], reply: Reply) -> None:
        """Score the given tokens."""
        if self._is_paused:
            self._waiting.append(lambda: self._do_generate(body, reply))
            return
        ids, start = body["input_ids"], body["logprob_start_len"]
        entries: list[tuple[float | None, int, None]] = [(None, ids[start], None)]
        for place in range(start + 1, len(ids)):
            entries.append((fake_logprob(ids[place - 1], ids[place], self.step), ids[place], None))
        answer = {"meta_info": {"input_token_logprobs": entries}}
        asyncio.get_running_loop().call_later(self._setting.token_s, reply, 200, answer)

    def _do_abort_request(self, body: dict[str, Any], reply: Reply) -> None:
        for call in [each for each in self._calls.values() if each.rid.startswith(body["rid"])]:
            self._abort(call)
        reply(200, None)

    def _do_pause_generation(self, body: dict[str, Any], reply: Reply) -> None:
        if not self._is_paused:
            self._is_paused, self._paused_at = True, loop_time()
            for call in self._calls.values():
                self._hold(call)
        reply(200, {"success": True})

    def _do_continue_generation(self, body: dict[str, Any], reply: Reply) -> None:
        if self._is_paused:
            self._is_paused = False
            for call in self._calls.values():
                self._plan(call)
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                each()
        reply(200, {"success": True})

    def _do_server_info(self, body: dict[str, Any], reply: Reply) -> None:
        reply(200, {"internal_states": [{"last_gen_throughput": 1.0}]})

    def _do_init_weights_update_group(self, body: dict[str, Any], reply: Reply) -> None:
        group, size = body["group_name"], body["world_size"]

        def joined(error: str | None) -> None:
            is_check = group.startswith(PATH_CHECK)
            reply(200, {"success": error is None, "message": error or (MET if is_check else "")})

        self._collectives.join(group, size, self.number, joined)

    def _do_update_weights_from_distributed(self, body: dict[str, Any], reply: Reply) -> None:
        label = body.get("weight_version")
        self._num_buckets = len(body["names"]) if body["load_format"] != "flattened_bucket" else 1
        if self._collectives.has(
            body["group_name"], self.number
        ):  # a late command for an abandoned group loads nothing
            self._begin_to_load()

        def received(step: int | None, error: str | None) -> None:
            if error is not None or step is None:
                reply(200, {"success": False, "message": error})
                return
            self._load(step, label)
            reply(200, {"success": True, "message": self._message()})

        self._collectives.receive(body["group_name"], self.number, self._num_buckets, received)

    def _do_update_weights_from_disk(self, body: dict[str, Any], reply: Reply) -> None:
        self._begin_to_load()
        step = self._collectives.read(body["model_path"])
        start = self._starts

        def loaded() -> None:
            if self.is_up and self._starts == start:
                self._load(step, body["weight_version"])
                reply(200, {"success": True, "message": self._message()})

        asyncio.get_running_loop().call_later(0.05, loaded)

    def _begin_to_load(self) -> None:
        if self._calls and not self._is_paused:
            raise Violation("weights change in a pause", f"engine {self.number} generates while it receives weights")
        self.step = MIXED

    def _load(self, step: int, label: str | None) -> None:
        if label is not None:
            self.step, self.label = step, label

    def _message(self) -> str:
        still = f"{STOOD_STILL}{loop_time() - self._paused_at:.6f}" if self._setting.has_stamps else ""
        return f"{RECORDED if self._setting.has_direct else ''} {still}"

    # ---- generation

    def _hung_s(self) -> float:
        return self._weather.lasting("hang", self.netloc)

    def _token_s(self) -> float:
        return self._setting.token_s * (20.0 if self._weather.lasting("slow", self.netloc) else 1.0)

    def _plan(self, call: _Call) -> None:
        """Set the timer of the call's next event."""
        size = min(self._setting.chunk, call.left, call.limit) - len(call.pending)
        wait_s = max(0.0, size * self._token_s() - call.paid_s)
        call.timer = asyncio.get_running_loop().call_later(wait_s, self._event, call)

    def _hold(self, call: _Call) -> None:
        """Keep the tokens that the call has by now, because the weights may change."""
        if call.timer is not None:
            left_s = max(0.0, call.timer.when() - loop_time())  # a blocked loop may have missed that moment
            self._generate(call, int(left_s / self._setting.token_s))
            _stop(call)

    def _generate(self, call: _Call, num_missing: int) -> None:
        """Add the tokens of the next event but for the last ``num_missing``."""
        size = min(self._setting.chunk, call.left, call.limit)
        while len(call.pending) < size - num_missing:
            token = token_of(call.seed, call.place, self._setting.longest)
            call.pending.append((fake_logprob(call.before, token, self.step), token, self.step, self.label))
            call.before, call.place = token, call.place + 1

    def _event(self, call: _Call) -> None:
        """Send the tokens of one event, and the end of the answer with the last one."""
        if (hung_s := self._hung_s()) > 0:
            call.timer = asyncio.get_running_loop().call_later(hung_s, self._event, call)
            return
        call.timer = None
        self._generate(call, 0)
        num = len(call.pending)
        reason = None
        if call.limit <= num:
            reason = {"type": "length", "length": call.sent + num}
        if call.left <= num:
            reason = {"type": "stop", "matched": STOP}
        self._send(call, reason)
        if reason is None:
            self._plan(call)

    def _abort(self, call: _Call) -> None:
        """End a call after one more token, as SGLang does."""
        _stop(call)
        if not self._is_paused:
            self._generate(call, max(0, min(self._setting.chunk, call.left, call.limit) - len(call.pending) - 1))
        self._send(call, {"type": "abort", "message": "Abort in decoding"})

    def _send(self, call: _Call, reason: dict[str, Any] | None) -> None:
        tokens, call.pending = call.pending, []
        call.sent += len(tokens)
        call.left -= len(tokens)
        call.limit -= len(tokens)
        is_unknown = bool(tokens) and self._weather.take("unknown_version", self.netloc)
        label = str(UNKNOWN) if is_unknown else self.label
        meta: dict[str, Any] = {
            "id": call.rid,
            "finish_reason": reason,
            "weight_version": label,
            "completion_tokens": call.sent,
            "output_token_logprobs": [(logprob, token, None) for logprob, token, _, _ in tokens],
        }
        if self._setting.has_stamps:
            meta[STAMPS] = [label if is_unknown else each for _, _, _, each in tokens]
        event = {"text": "", "output_ids": [token for _, token, _, _ in tokens], "meta_info": meta}
        if reason is not None:
            self._calls.pop(call.connection, None)
        call.connection.send(orjson.dumps(event), is_last=reason is not None)


def _stop(call: _Call) -> None:
    if call.timer is not None:
        call.timer.cancel()
        call.timer = None
