"""The server's socket and its life: from the address that is printed to Ctrl-C.

Invariants: a port that is taken is followed by the next; it ends within a second of a signal, whoever is still
connected. Not here: answers (app.py), the command (cli/view.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from ringmap.errors import EnvironmentFault, InputError
from ringmap.extras import require
from ringmap.viewer.library import Library

__all__ = ["Server", "listen", "tunnel_line"]

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
    """Return the host that this machine connects to, to reach a server that listens on `host`; an IPv6 address in
    brackets."""
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

        from ringmap.viewer.access import Access
        from ringmap.viewer.app import Viewer, make_app

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
