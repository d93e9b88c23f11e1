"""The HTTP server of the page.  It reads run directories and changes nothing in them but its index.

browser ──GET──▶ key and host are checked ──▶ a thread reads files and renders ──▶ HTML or JSON

waits for     files, in a thread, for at most ``ANSWER_S``
on failure    an error page with one line; the traceback is in the log
on exit       the port closes; threads that still read are abandoned
"""

import asyncio
import hmac
import importlib.util
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import jinja2
import orjson
from aiohttp import web
from markupsafe import Markup

from asyncrl.daemon_threads import DaemonThreads
from asyncrl.event_loop import Deadline
from asyncrl.page.address import LOOPBACK, url_of
from asyncrl.page.runs.run_files import RunFiles
from asyncrl.page.runs.run_status import State
from asyncrl.page.tabs.advice import TAB as ADVICE
from asyncrl.page.tabs.configuration import TAB as CONFIGURATION
from asyncrl.page.tabs.overview import TAB as OVERVIEW
from asyncrl.page.tabs.samples import TAB as SAMPLES
from asyncrl.page.tabs.staleness import TAB as STALENESS
from asyncrl.page.tabs.tab import PageRequest, Tab
from asyncrl.page.tabs.timeline import TAB as TIMELINE

logger = logging.getLogger(__name__)

TABS: Sequence[Tab] = (OVERVIEW, TIMELINE, STALENESS, SAMPLES, ADVICE, CONFIGURATION)
ANSWER_S = 60.0
"""Limit for an answer; a disk that hangs then gives an error page."""
COOKIE = "asyncrl_page"
_THREADS = 4
_FOLDER = Path(__file__).parent
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Nothing comes from elsewhere, and text of a model that became HTML by mistake could run nothing."""

type Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PageServer:
    """Serves the page of some runs.  ``url`` has the key; without it nothing is shown."""

    def __init__(self, runs: Sequence[RunFiles], *, key: str | None = None) -> None:
        self._runs = runs
        self._key = key or secrets.token_urlsafe(24)
        self._port = 0
        self._threads = DaemonThreads(_THREADS, "page")
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals["as_json"] = as_json

    @property
    def url(self) -> str:
        """The address of the page with its key."""
        return url_of(self._port, self._key)

    @asynccontextmanager
    async def open(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serve on ``listener``, and close it at the end."""
        runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            self._port = listener.getsockname()[1]
            await web.SockSite(runner, listener).start()
            yield
        finally:
            await runner.cleanup()
            self._threads.shutdown()

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._home)
        app.router.add_get("/run/{number}/{tab}", self._tab)
        app.router.add_get("/run/{number}/{tab}/data/{name}", self._data)
        app.router.add_get("/plotly.js", _plotly)
        app.router.add_static("/static", _FOLDER / "static")
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests without the key, and requests that a foreign site made the browser send."""
        if request.host.partition(":")[0] not in {LOOPBACK, "localhost"}:  # the name of a site that resolves to us
            return web.Response(status=403, text="this page answers only under the address that asyncrl printed\n")
        given = request.query.get("key", request.cookies.get(COOKIE, ""))
        if not hmac.compare_digest(given.encode(), self._key.encode()):
            return web.Response(status=401, text="open the whole address that asyncrl printed: it has the page's key\n")
        response = await self._answer(request, handler)
        response.headers["Content-Security-Policy"] = _POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if "key" in request.query:  # the key leaves the address line and the history
            found = web.HTTPSeeOther(request.rel_url.without_query_params("key"))
            response = web.Response(status=found.status, headers={"Location": str(found.location)})
            response.set_cookie(COOKIE, self._key, httponly=True, samesite="Strict")
            return response
        try:
            async with Deadline(ANSWER_S):
                return await handler(request)
        except web.HTTPRedirection:
            raise
        except web.HTTPException as error:
            return self._problem(error.status, error.text or error.reason)
        except TimeoutError:
            return self._problem(504, f"the files of the run were not read within {ANSWER_S:.0f} s")
        except Exception as error:
            logger.exception("%s", request.path)
            return self._problem(500, f"{type(error).__name__}: {error}")

    def _problem(self, status: int, text: str) -> web.Response:
        page = self._templates.get_template("problem.html").render(status=status, text=text)
        return web.Response(status=status, text=page, content_type="text/html")

    async def _home(self, request: web.Request) -> web.StreamResponse:
        if len(self._runs) == 1:
            raise web.HTTPSeeOther("/run/0/overview")
        return await self._rendered("home.html", lambda: {"runs": self._runs, "tabs": TABS})

    async def _tab(self, request: web.Request) -> web.StreamResponse:
        tab, asked = self._asked(request)

        def values() -> Mapping[str, Any]:
            with _reading(asked.runs):
                found = tab.show(asked)
            is_live = any(run.state in {State.RUNNING, State.UNKNOWN} for run in asked.runs)
            return {"tab": tab, "asked": asked, "is_live": is_live, "runs": self._runs, "tabs": TABS, **found}

        return await self._rendered(f"{tab.key}.html", values)

    async def _data(self, request: web.Request) -> web.StreamResponse:
        tab, asked = self._asked(request)
        data = tab.data.get(request.match_info["name"])
        if data is None:
            raise web.HTTPNotFound

        def body() -> bytes:
            with _reading(asked.runs):
                return orjson.dumps(data(asked), option=orjson.OPT_SERIALIZE_NUMPY)

        return web.Response(body=await self._in_thread(body), content_type="application/json")

    def _asked(self, request: web.Request) -> tuple[Tab, PageRequest]:
        """Return tab and runs of a request.  Raises HTTPNotFound."""
        tabs = {tab.key: tab for tab in TABS}
        try:
            tab, run = tabs[request.match_info["tab"]], self._run(request.match_info["number"])
            others = [self._run(number) for number in request.query.getall("with", ())]
        except (KeyError, ValueError, IndexError):
            raise web.HTTPNotFound(text="there is no such page") from None
        return tab, PageRequest(run=run, others=[each for each in others if each is not run], query=request.query)

    def _run(self, number: str) -> RunFiles:
        """Return a run by its number.  Raises ValueError or IndexError."""
        place = int(number)
        if place < 0:
            raise IndexError(number)
        return self._runs[place]

    async def _rendered(self, template: str, values: Callable[[], Mapping[str, Any]]) -> web.StreamResponse:
        text = await self._in_thread(lambda: self._templates.get_template(template).render(values()))
        return web.Response(text=text, content_type="text/html")

    async def _in_thread[Result](self, function: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self._threads.submit(function))


@contextmanager
def _reading(runs: Sequence[RunFiles]) -> Iterator[None]:
    """Hold the locks of ``runs``, in the order of their numbers, and read their newest rows."""
    with ExitStack() as stack:
        for run in sorted(runs, key=lambda run: run.number):
            stack.enter_context(run.lock)
            run.rows.update()
        yield


def as_json(value: Any) -> Markup:
    """Return JSON for a script element: no character in it can end the element."""
    text = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


async def _plotly(request: web.Request) -> web.StreamResponse:
    """Send the library that draws figures, from the Python package plotly, without importing that."""
    found = importlib.util.find_spec("plotly")
    assert found is not None  # a dependency of asyncrl
    path = Path(next(iter(found.submodule_search_locations or ()))) / "package_data" / "plotly.min.js"
    return web.FileResponse(path, headers={"Cache-Control": "private, max-age=86400"})
