"""The server's socket and its life, from the address that is printed to Ctrl-C; who may ask; a page in a notebook.

    GET /?token=T        303, a cookie               (HttpOnly, SameSite=Strict)
    GET /t/T/...         as below, for a frame in a notebook, where cookies of another site are not sent
    with the cookie      the page and its data
    anything else        403, and nothing more

    show(buf) -> Server in a thread, on 127.0.0.1, frames allowed -> <iframe src=".../t/TOKEN/#/p/KEY">

Invariants: a port that is taken is followed by the next; the server ends within a second of a signal, whoever is still
connected. A Host that is not ours (DNS rebinding), an Origin that is not the Host, and a wrong token get the same 403;
a change needs an Origin; every reply has a strict Content-Security-Policy.
Not here: answers (app.py), the command (cli/view.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import html
import ipaddress
import os
import re
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from ringmap.buffers.base import Buffer
from ringmap.datasets.base import Dataset
from ringmap.errors import EnvironmentFault, InputError
from ringmap.extras import require
from ringmap.viewer.library import SOURCES, Library
from ringmap.viewer.places import FLEET
from ringmap.viewer.sources import DatasetSource, Source

__all__ = ["Access", "Server", "Shown", "listen", "show", "tunnel_line"]


_NEXT_PORTS = 50
_GRACE_S = 0.4
_ALL = ("0.0.0.0", "::")
"""Hosts that stand for all addresses of the machine."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on a port, or on the next one that is free.

    Raises:
        InputError: there is no such address or port.
        EnvironmentFault: all of them are taken.
    """
    if not 0 <= port < 65536:
        raise InputError(f"view: --port must be 0 to 65535, got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in range(port, min(65536, port + _NEXT_PORTS)) if port else (0,):
        # asyncio sends at once only where the protocol is named: else a small reply waits 40 ms for the client's
        # acknowledgement.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, number))
            bound.listen(64)
            return bound
        except OSError as error:
            bound.close()
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise InputError(f"view: --host {host}: this machine has no such address") from None
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise EnvironmentFault(error.errno, f"view: {host}:{number}: {error}") from error
    raise EnvironmentFault(
        errno.EADDRINUSE, f"view: ports {port} to {port + _NEXT_PORTS - 1} are taken; give another --port"
    )


def tunnel_line(port: int, host: str = "127.0.0.1") -> str | None:
    """Return the line that makes the page reachable from where the user sits; None unless this is behind ssh.

    Args:
        port: of the server.
        host: the address that it listens on.
    """
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if len(connection) != 4:
        return None
    user = os.environ.get("USER", "you")
    return f"ssh -N -L {port}:{_host_here(host)}:{port} {user}@{connection[2]}"


def _host_here(host: str) -> str:
    """Return the host by which this machine reaches a server on `host`; an IPv6 address in brackets."""
    if host in (*_ALL, "localhost"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


class Server:
    """The viewer, served.

    Args:
        library: what is shown.
        host: the address to listen on.
        port: the first port to try; 0: any.
        frames: whether pages of this machine may show it in a frame.

    Raises:
        MissingExtraError: Starlette or uvicorn is not installed.
    """

    def __init__(
        self,
        library: Library,
        host: str = "127.0.0.1",
        port: int = 7777,
        *,
        frames: bool = False,
    ) -> None:
        require("view", "ringmap view")
        self.library, self.host, self.frames = library, host, frames
        self.token = secrets.token_urlsafe(24)
        self.socket = listen(host, port)
        self.port: int = self.socket.getsockname()[1]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """The address to open, with its token."""
        return self._at(_host_here(self.host))

    @property
    def address_outside(self) -> str | None:
        """The address for other machines, if it listens on all addresses of this one."""
        return self._at(socket.gethostname()) if self.host in _ALL else None

    def _at(self, host: str) -> str:
        return f"http://{host}:{self.port}/?token={self.token}"

    @property
    def frame_address(self) -> str:
        """The address for a frame, where no cookie is sent."""
        return f"http://127.0.0.1:{self.port}/t/{self.token}/"

    def run(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until Ctrl-C, a signal to end, or `stop`."""
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(self._serve(ready))

    def start(self) -> None:
        """Serve in a thread of its own."""
        begun = threading.Event()
        self._thread = threading.Thread(target=self.run, args=(begun.set,), daemon=True, name="ringmap-view")
        self._thread.start()
        if not begun.wait(20):
            raise EnvironmentFault(errno.ETIMEDOUT, "view: the server did not start within 20 s")

    def stop(self) -> None:
        """End, and wait for it."""
        loop, server = self._loop, self._server
        if loop is not None and server is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(setattr, server, "should_exit", True)
        if self._thread is not None:
            self._thread.join(5)

    async def _serve(self, ready: Callable[[], None] | None) -> None:
        import uvicorn

        from ringmap.viewer.app import Viewer, make_app
        from ringmap.viewer.serve import Access

        viewer = Viewer(self.library)
        app = Access(make_app(viewer), self.token, self.port, self.host, self.frames)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="on",
            server_header=False,
            limit_concurrency=128,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=5,
            proxy_headers=False,
            loop="asyncio",
            http="h11",
            ws="none",
        )
        self._loop = asyncio.get_running_loop()
        self._server = server = uvicorn.Server(config)

        async def watch() -> None:
            while not server.started:
                await asyncio.sleep(0.01)
            if ready is not None:
                ready()
            while not server.should_exit:
                await asyncio.sleep(0.05)
            viewer.stopping.set()
            for followed in viewer.followed():
                followed.changed.set()
            await asyncio.sleep(_GRACE_S)
            server.force_exit = True

        watching = asyncio.create_task(watch())
        try:
            await server.serve(sockets=[self.socket])
        finally:
            watching.cancel()
            self.socket.close()


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors {frames}"
)
_FRAMES = "'self' http://localhost:* http://127.0.0.1:* https://localhost:* vscode-webview:"


class Access:
    """ASGI middleware that admits the user who was given the token.

    Args:
        app: what is served.
        token: the secret.
        port: of the server; names the cookie, which browsers share among ports.
        host: the address that is listened on; unless it is of this machine alone, its other addresses and names are
            hosts, too.
        frames: whether pages of this machine may show the page in a frame.
    """

    def __init__(self, app: App, token: str, port: int, host: str = "127.0.0.1", frames: bool = False) -> None:
        self.app, self.token, self.port, self.frames = app, token, port, frames
        self.cookie = f"ringmap-{port}"
        self.hosts = {"127.0.0.1", "localhost", "[::1]"}
        self.is_public = host not in ("127.0.0.1", "localhost", "::1")
        if self.is_public:
            self.hosts |= {host, socket.gethostname(), socket.getfqdn()}
        policy = _POLICY.format(frames=_FRAMES if frames else "'none'")
        self.headers = [
            (b"content-security-policy", policy.encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-resource-policy", b"same-origin"),
            (b"cross-origin-opener-policy", b"same-origin"),
            (b"cache-control", b"no-store"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websockets

        async def sent(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                kept = [h for h in message.get("headers", ()) if h[0] != b"cache-control"]
                message["headers"] = [*kept, *self.headers]
            await send(message)

        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        if not self._is_ours(scope, headers):
            await _reply(sent, 403, b"403 Forbidden\n")
            return
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if "token" in query:
            if not self._matches(query["token"][0]) or scope["method"] != "GET":
                await _reply(sent, 403, b"403 Forbidden\n")
                return
            cookie = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
            await _reply(sent, 303, b"", [(b"location", b"/"), (b"set-cookie", cookie.encode())])
            return
        path = scope["path"]
        if path.startswith("/t/"):
            given, slash, rest = path[3:].partition("/")
            if not (self.frames and slash and self._matches(given)):
                await _reply(sent, 403, b"403 Forbidden\n")
                return
            scope = {**scope, "path": "/" + rest, "raw_path": ("/" + rest).encode()}
        elif not self._has_cookie(headers):
            await _reply(sent, 403, b"403 Forbidden\n")
            return
        await self.app(scope, receive, sent)

    def _matches(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def _is_ours(self, scope: Scope, headers: dict[str, str]) -> bool:
        """Tell whether a request is for this host, and from its own page if it is from one."""
        host = headers.get("host", "")
        if [name for name, _ in scope["headers"]].count(b"host") != 1 or not self._is_host(host):
            return False
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return False
        if scope["method"] not in ("GET", "HEAD") and origin is None:
            return False
        # Browsers say who asks. A link in a mail, or a notebook's frame, may open the page; no other site may load its
        # data.
        site = headers.get("sec-fetch-site", "none")
        return site in ("none", "same-origin") or headers.get("sec-fetch-mode") == "navigate"

    def _is_host(self, host: str) -> bool:
        name, _, port = host.rpartition(":")
        if not name or not re.fullmatch("[0-9]{1,5}", port):  # other digits, and thousands, are no port
            name, port = host, "80"
        if int(port) != self.port:
            return False
        if name.lower() in self.hosts:
            return True
        if not self.is_public:
            return False
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True  # an address can't be rebound

    def _has_cookie(self, headers: dict[str, str]) -> bool:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return False
        return found is not None and self._matches(found.value)


async def _reply(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", b"text/plain; charset=utf-8"), *(headers or [])],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})


class Shown:
    """What is shown: a notebook draws it as a frame; elsewhere `address` opens it in a browser.

    Args:
        server: it, started.
        page: which, as the end of the address.
        height: of the frame, in pixels.
    """

    def __init__(self, server: Server, page: str, height: int) -> None:
        self._server, self._page, self._height = server, page, height

    @property
    def address(self) -> str:
        """The address for a browser, with its token."""
        return f"{self._server.address}{self._page}"

    def close(self) -> None:
        """End the server."""
        self._server.stop()
        self._server.library.close()

    def _repr_html_(self) -> str:
        where = html.escape(f"{self._server.frame_address}{self._page}", quote=True)
        return (
            f'<iframe src="{where}" width="100%" height="{self._height}" title="ringmap view" '
            f'style="border:0"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Shown({self.address!r})"


def show(buffer: Any, height: int = 640) -> Shown:
    """Show a buffer or dataset of this process as a page in a notebook, while it is written.

    Args:
        buffer: a `ReplayBuffer` or `TransitionReplayBuffer`, in RAM or not, writer or reader; a `ShardedReplayBuffer`;
            or a dataset.
        height: of the frame, in pixels.

    Returns:
        What a notebook draws as a frame. `address` is for a browser; `close` ends the server.

    Raises:
        InputError: it is neither.
        MissingExtraError: the extra `view` is not installed.

    Processes and threads: a thread of this process serves it, on 127.0.0.1, and reads beside the writer.
    """
    require("view", "show")
    rings = buffer.ring_paths if isinstance(buffer, Buffer) else None
    library = Library([], _sources(buffer)) if rings is None else Library(rings)
    server = Server(library, port=0, frames=True)
    server.start()
    places = library.places()
    if rings is not None:
        places = [place for place in places if place.kind == FLEET]
    return Shown(server, f"#/p/{places[0].key}" if places else "#/", height)


def _sources(buffer: Any) -> dict[str, Source]:
    """Return what reads a ring or a dataset, by its name on the page."""
    if (kind := buffer.kind if isinstance(buffer, Buffer) else None) in SOURCES:
        return {"RAM" if buffer.path is None else str(buffer.path): SOURCES[kind](buffer)}
    if kind is None and isinstance(buffer, Dataset):
        return {str(getattr(buffer, "path", type(buffer).__name__)): DatasetSource(buffer)}
    raise InputError(f"show: a buffer of episodes or transitions, or a dataset, is shown, got {type(buffer).__name__}")
