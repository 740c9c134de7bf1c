"""Who may ask: a token in the address once, then a cookie; no other site, no other host name.

    GET /?token=T        303, a cookie               (HttpOnly, SameSite=Strict)
    GET /t/T/...         as below, for a frame in a notebook, where cookies of another site are not sent
    with the cookie      the page and its data
    anything else        403, and nothing more

Invariants: a Host that is not ours (DNS rebinding), an Origin that is not the Host, and a wrong token get the same 403;
a change needs an Origin; every reply has a strict Content-Security-Policy.
Not here: what is served (app.py).
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

__all__ = ["Access"]

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
