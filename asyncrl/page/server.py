"""The HTTP server of the page.  It reads run directories and changes nothing in them but its index.

start ─────▶ a thread reads the rows, while the browser starts
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
from functools import cache
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
from asyncrl.page.tabs.all_tabs import TABS
from asyncrl.page.tabs.tab import PageRequest, Tab

logger = logging.getLogger(__name__)

ANSWER_S = 60.0
"""Limit for an answer; a disk that hangs then gives an error page."""
COOKIE = "asyncrl_page"
"""Beginning of the cookie's name; the port follows, since a browser sends the cookies of a host to all its ports."""
_THREADS = 4
_FOLDER = Path(__file__).parent
_IMPORT_AFTER_S = 2.0
"""Seconds in which the browser draws, before the page takes a core again."""
_FIRST = "X-First"
"""Header of the script's first request, after which it asks for what still lacks."""
_PLOTLY = "/plotly.js"
_STATIC = _FOLDER / "static"
_KEPT = "private, max-age=31536000, immutable"
"""The browser keeps files whose address has their version, and asks for them no more."""
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
        self._has_imported = False
        self._threads = DaemonThreads(_THREADS, "page")
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals |= {"as_json": as_json, "versioned": versioned}

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
            self._threads.submit(self._read_ahead)
            yield
        finally:
            await runner.cleanup()
            self._threads.shutdown()

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._home)
        app.router.add_get("/run/{number}/{tab}", self._tab)
        app.router.add_get("/run/{number}/{tab}/data/{name}", self._data)
        app.router.add_get(_PLOTLY, _plotly)
        app.router.add_static("/static", _STATIC)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests without the key, and requests that a foreign site made the browser send."""
        if request.host.partition(":")[0] not in {LOOPBACK, "localhost"}:  # the name of a site that resolves to us
            return web.Response(status=403, text="this page answers only under the address that asyncrl printed\n")
        given = request.query.get("key", request.cookies.get(cookie_of(request.host), ""))
        # What a client sends may be no text: bytes that UTF-8 cannot decode arrive as halves of surrogate pairs.
        if not hmac.compare_digest(given.encode(errors="surrogatepass"), self._key.encode()):
            return web.Response(status=401, text="open the whole address that asyncrl printed: it has the page's key\n")
        response = await self._answer(request, handler)
        if "v" in request.query and response.status < 400:
            response.headers["Cache-Control"] = _KEPT
        response.headers["Content-Security-Policy"] = _POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if "key" in request.query:  # the key leaves the address line and the history
            found = web.HTTPSeeOther(request.rel_url.without_query_params("key"))
            response = web.Response(status=found.status, headers={"Location": str(found.location)})
            response.set_cookie(cookie_of(request.host), self._key, httponly=True, samesite="Strict")
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
        if tab is TABS[0] and _is_navigation(request) and not all(run.is_read for run in asked.runs):
            return await self._rendered("frame.html", lambda: self._frame(tab, asked))

        def values() -> Mapping[str, Any]:
            with _reading(asked.runs):
                found = tab.views().show(asked)
            return {**self._frame(tab, asked), **found}

        page = await self._rendered(f"{tab.key}.html", values)
        if not self._has_imported:  # the other tabs, once the first one is on its way
            self._has_imported = True
            asyncio.get_running_loop().call_later(_IMPORT_AFTER_S, self._threads.submit, _import_tabs)
        return page

    def _frame(self, tab: Tab, asked: PageRequest) -> dict[str, Any]:
        """Return the values of a page without its content."""
        is_live = any(run.state in {State.RUNNING, State.UNKNOWN} for run in asked.runs)
        return {"tab": tab, "asked": asked, "is_live": is_live, "runs": self._runs, "tabs": TABS}

    def _read_ahead(self) -> None:
        """Read the rows of all runs, and import the first tab."""
        for run in self._runs:
            try:
                with _reading([run]):
                    TABS[0].views()
            except Exception:
                logger.exception("%s", run.path)  # the first request shows it
            finally:
                run.is_read = True

    async def _data(self, request: web.Request) -> web.StreamResponse:
        tab, asked = self._asked(request)
        data = tab.views().data.get(request.match_info["name"])
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
        # Each run once: ``_reading`` takes the lock of each, and would wait for itself at the second time.
        others = list({each.number: each for each in others if each is not run}.values())
        return tab, PageRequest(run=run, others=others, query=request.query, is_first=_FIRST in request.headers)

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


def cookie_of(host: str) -> str:
    """Return the name of the cookie with the key, for the page that a browser knows as ``host``.

    The port is the one that the browser uses.  Behind tunnels, pages of two machines may listen on the same port.
    """
    port = host.rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isascii() and port.isdecimal() else COOKIE


def as_json(value: Any) -> Markup:
    """Return JSON for a script element: no character in it can end the element."""
    text = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def versioned(address: str) -> str:
    """Return the address of a file with its version, so that a browser may keep it."""
    path = _plotly_file() if address == _PLOTLY else _FOLDER / address.removeprefix("/")
    found = path.stat()
    return f"{address}?v={found.st_size:x}-{int(found.st_mtime):x}"


def _import_tabs() -> None:
    for tab in TABS:
        tab.views()


def _is_navigation(request: web.Request) -> bool:
    """Whether a person opens the page: the script of a page and other programs wait for the content instead."""
    return request.headers.get("Sec-Fetch-Mode") == "navigate"


@cache
def _plotly_file() -> Path:
    """Return the library that draws figures, from the Python package plotly, without importing that."""
    found = importlib.util.find_spec("plotly")
    assert found is not None  # a dependency of asyncrl
    return Path(next(iter(found.submodule_search_locations or ()))) / "package_data" / "plotly.min.js"


async def _plotly(request: web.Request) -> web.StreamResponse:
    return web.FileResponse(_plotly_file())
