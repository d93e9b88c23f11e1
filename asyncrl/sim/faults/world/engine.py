"""A simulated SGLang server: tokens that a pure function gives, its commands, and its ways to fail.

Token i of an answer depends on the request's seed and i alone.  Its log-prob depends on the weights that the engine
held, so that a trained token shows which weights generated it, whatever its version says.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson

from asyncrl.engines.fake import fake_logprob
from asyncrl.engines.sglang.labels import RECORDED, STAMPS, STOOD_STILL
from asyncrl.engines.weight_sync.path_check import MET, PATH_CHECK
from asyncrl.event_loop import loop_time
from asyncrl.sim.faults.world.collective import Collectives, Joined
from asyncrl.sim.faults.world.network import Connection, Network, Reply
from asyncrl.sim.faults.world.plan import Setting
from asyncrl.sim.faults.world.tokens import MIXED, PROMPT_TOKENS, STOP, UNKNOWN, length_of, token_of
from asyncrl.sim.faults.world.violation import Violation

FRONT_S = 5.0
"""Seconds for which SGLang's HTTP process outlives its scheduler."""
REPORTED_S = 64.0
"""Seconds after which Ray reports the actors of a machine that has vanished as dead."""
REFUSED_S, MEETING_S = 1.0, 6.0
"""Seconds after which the plug-in gives up an update group, or a path check, whose store is not served."""
_BY_FRONT = ("health", "model_info")
"""Commands that SGLang's HTTP process answers without its scheduler."""


class _Call:
    """A request that the engine answers."""

    __slots__ = ("before", "connection", "left", "limit", "pending", "place", "rid", "seed", "sent", "timer")

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
        self.timer: asyncio.TimerHandle | None = None


class SimEngine:
    """One engine process after the other at one place of the run."""

    def __init__(
        self, number: int, setting: Setting, network: Network, collectives: Collectives, note: Callable[[str], None]
    ) -> None:
        self.number = number
        self.is_up = False
        self.has_scheduler = False
        """Whether the process that uses the GPU lives.  Without it, the HTTP process soon ends as well."""
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
        """Requests that wait for the end of a pause."""
        self._is_in_collective = False
        self._held = list[Callable[[], None]]()
        """Acts of the scheduler once it is free.  It stands still while it waits for other members of a group."""
        self._joining: str | None = None
        """The group whose store the scheduler tries to reach."""
        self._num_buckets = 0
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

    @property
    def is_stuck(self) -> bool:
        """Whether the scheduler tries to reach a store that nothing serves, and will not give it up by itself."""
        return (
            not self._setting.has_direct
            and self._joining is not None
            and not self._collectives.is_served(self._joining)
        )

    # ---- the process

    def start(self) -> None:
        """Start a process with weights from the disk of models, which no run has trained."""
        if self._starts:
            self._network.hosts.pop(self.netloc, None)
            self.netloc = f"10.0.0.{self.number}:{30000 + self._starts}"
        self._starts += 1
        self.is_up = self.has_scheduler = True
        self._is_paused = self._is_in_collective = False
        self._joining = None
        self.step, self.label = MIXED, "default"
        self._network.hosts[self.netloc] = self
        self._weather.numbers[self.netloc] = self.number

    def die(self) -> None:
        """End the process; its connections break."""
        if not self.is_up:
            return
        self.is_up = self.has_scheduler = False
        calls, self._calls = self._calls, {}
        for call in calls.values():
            _stop(call)
            if call.connection not in self._network.connections:  # a router's
                call.connection.lose(ConnectionResetError("the engine has died"))
        self._waiting.clear()
        self._held.clear()
        self._collectives.leave(self.number)
        self._network.reset(self.netloc)
        self.on_death()

    def lose_scheduler(self) -> None:
        """End the scheduler; the HTTP process notices it ``FRONT_S`` later, and nothing answers until then."""
        self.has_scheduler = False
        for call in self._calls.values():
            _stop(call)
        self._collectives.leave(self.number)
        asyncio.get_running_loop().call_later(FRONT_S, self._end_front, self._starts)

    def vanish(self) -> None:
        """Lose the machine: nothing answers any more, and nothing reports it for a while."""
        self.is_up = self.has_scheduler = False
        for call in self._calls.values():
            _stop(call)
        for left in (self._calls, self._waiting, self._held):
            left.clear()
        self._collectives.leave(self.number)
        self._network.vanish(self.netloc)
        asyncio.get_running_loop().call_later(REPORTED_S, self._report_death, self._starts)

    def _report_death(self, start: int) -> None:
        if self._starts == start:
            self.on_death()

    def _if_same(self, act: Callable[[], None], start: int) -> None:
        """Do it if the scheduler that was started then still runs."""
        if self.has_scheduler and self._starts == start:
            act()

    def _end_front(self, start: int) -> None:
        if self._starts == start:
            self.die()

    def _postpones_while_hung(self, act: Callable[[], None]) -> bool:
        """Return whether the whole engine hangs; ``act`` follows once it does not."""
        if (hung_s := self._weather.lasting("hang", self.netloc)) <= 0:
            return False
        asyncio.get_running_loop().call_later(hung_s, self._if_same, act, self._starts)
        return True

    def _postpones_while_occupied(self, act: Callable[[], None]) -> bool:
        """Return whether the scheduler cannot act now; ``act`` follows once it can."""
        if self.has_scheduler and self._is_in_collective:
            self._held.append(act)
        return not self.has_scheduler or self._is_in_collective

    def _leave_collective(self) -> None:
        self._is_in_collective = False
        held, self._held = self._held, []
        for act in held:
            act()

    # ---- Host

    def stream(self, connection: Connection, body: dict[str, Any]) -> None:
        """See ``Host.stream``."""
        again = partial(self._stream_if_open, connection, body)
        if self._postpones_while_hung(again) or self._postpones_while_occupied(again):
            return
        call = self._calls[connection] = _Call(connection, body, self._setting.longest)
        if not self._is_paused:
            self._plan(call)

    def _stream_if_open(self, connection: Connection, body: dict[str, Any]) -> None:
        if not connection.is_closing():
            self.stream(connection, body)

    def closed(self, connection: Connection) -> None:
        """See ``Host.closed``."""
        if self._setting.aborts_on_disconnect and (call := self._calls.pop(connection, None)) is not None:
            _stop(call)

    def command(self, method: str, path: str, body: dict[str, Any], reply: Reply) -> None:
        """See ``Host.command``."""
        if self._postpones_while_hung(partial(self.command, method, path, body, reply)):
            return
        status = None if method == "GET" else self._weather.refusal(self.netloc)
        if status is not None:
            reply(status, {"error": "simulated"})
            return
        self._obey(path[1:], body, reply)

    def _obey(self, name: str, body: dict[str, Any], reply: Reply) -> None:
        if name not in _BY_FRONT and self._postpones_while_occupied(partial(self._obey, name, body, reply)):
            return
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
        later = asyncio.get_running_loop().call_later
        later(self._setting.token_s, self._if_same, partial(reply, 200, answer), self._starts)

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
        group, start = body["group_name"], self._starts
        self._is_in_collective = True
        self._joining = group

        def joined(error: str | None) -> None:
            if self.has_scheduler and self._starts == start:
                self._joining = None
                is_check = group.startswith(PATH_CHECK)
                reply(200, {"success": error is None, "message": error or (MET if is_check else "")})
                self._leave_collective()

        self._join(group, body["world_size"], joined)

    def _join(self, group: str, size: int, joined: Joined) -> None:
        """Join a group once the path to its store is whole.  Without the plug-in, a closed store is tried for ever."""
        later = asyncio.get_running_loop().call_later
        if (cut_s := self._weather.lasting("trainer_partition", self.netloc)) > 0:
            later(cut_s, self._if_same, partial(self._join, group, size, joined), self._starts)
            return
        waits = not self._collectives.is_abandoned(group)
        if waits:
            self._collectives.join(group, size, self.number, joined)
        if self._setting.has_direct:
            limit_s = MEETING_S if group.startswith(PATH_CHECK) else REFUSED_S
            later(limit_s, self._if_same, partial(self._give_up, group, waits, joined), self._starts)

    def _give_up(self, group: str, waits: bool, joined: Joined) -> None:
        if not waits or self._collectives.give_up(group, self.number):
            joined("the trainer serves no store")

    def _do_update_weights_from_distributed(self, body: dict[str, Any], reply: Reply) -> None:
        label = body.get("weight_version")
        self._num_buckets = len(body["names"]) if body["load_format"] != "flattened_bucket" else 1
        # A late command for an abandoned group loads nothing.
        if self._collectives.has(body["group_name"], self.number):
            self._begin_to_load()

        self._is_in_collective = True

        def received(step: int | None, error: str | None) -> None:
            if error is not None or step is None:
                reply(200, {"success": False, "message": error})
            else:
                self._load(step, label)
                reply(200, {"success": True, "message": self._message()})
            self._leave_collective()

        self._collectives.receive(body["group_name"], self.number, self._num_buckets, received)

    def _do_update_weights_from_disk(self, body: dict[str, Any], reply: Reply) -> None:
        try:
            step = self._collectives.read(body["model_path"])
        except OSError as error:  # a late command: the folder of an earlier update has been removed
            reply(400, {"success": False, "message": f"Failed to get weights iterator: {error}."})
            return
        self._begin_to_load()

        def loaded() -> None:
            self._load(step, body["weight_version"])
            reply(200, {"success": True, "message": self._message()})

        asyncio.get_running_loop().call_later(0.05, self._if_same, loaded, self._starts)

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

    def _token_s(self) -> float:
        return self._setting.token_s * (20.0 if self._weather.lasting("slow", self.netloc) else 1.0)

    def _plan(self, call: _Call) -> None:
        """Set the timer of the call's next event."""
        _stop(call)
        size = min(self._setting.chunk, call.left, call.limit) - len(call.pending)
        call.timer = asyncio.get_running_loop().call_later(size * self._token_s(), self._event, call)

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
        if (hung_s := self._weather.lasting("hang", self.netloc)) > 0:
            call.timer = asyncio.get_running_loop().call_later(hung_s, self._event, call)
            return
        call.timer = None
        if self._postpones_while_occupied(partial(self._event_if_open, call)):
            return
        if self._is_paused:  # by a command that the scheduler obeyed first; the end of the pause plans the event anew
            return
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

    def _event_if_open(self, call: _Call) -> None:
        """Send an event that was postponed, unless the call is over, or a pause has ended and set its timer anew."""
        if self._calls.get(call.connection) is call and call.timer is None:
            self._event(call)

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
