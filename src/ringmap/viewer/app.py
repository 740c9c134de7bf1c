"""The server's answers: the page, JSON, pictures, columns, events.

    GET  /  /static/NAME                   the page
    GET  /api/places  place  spread        what there is
    GET  /api/episodes  episode  columns  frames  text  thumb  download
    POST /api/mark                         flags and a note of an episode: the only change, unless `read_only`
    GET  /api/events                       server-sent events: what is new

Invariants: a request reads and replies within the limits of drawing.py; work is done in threads, a few at a time; an
error is JSON with a sentence; a client that reads slowly gets the newest state when it reads, and keeps nobody waiting.
Not here: who may ask, and the socket (serve.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ringmap.errors import (
    ClosedError,
    DamageError,
    EnvironmentFault,
    InputError,
    LockedError,
    MissingExtraError,
    NotFoundError,
    ReadOnlyError,
    ReplacedError,
    RingmapError,
    UnknownColumnError,
)
from ringmap.formats.base import EPISODE_DATA_KEY
from ringmap.formats.media.images import sheet, shown, spread
from ringmap.formats.media.videos import write_video
from ringmap.formats.registry import get_format
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.system import cores
from ringmap.viewer.drawing import (
    FRAMES,
    MARK_NBYTES,
    MOST_NBYTES,
    POINTS,
    ROWS,
    GoneError,
    TooLargeError,
    encoded,
    kind_of,
    lines_of,
    packed,
    plain,
)
from ringmap.viewer.library import Fleet, Library
from ringmap.viewer.open_dataset import JoinedTable, OpenDataset, described

__all__ = ["Viewer", "download", "make_app"]


log = logging.getLogger("ringmap")

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_EVERY_S = 0.5
"""Between two polls of a ring that somebody watches."""
_IDLE_POLLS = 20
"""After so many polls for nobody, polling ends."""
_STILL_S = 15.0
"""Between two comments to a client while nothing happens: they tell that it has gone."""


class Viewer:
    """Answers requests over a library.

    Args:
        library: the places.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self._limit: anyio.CapacityLimiter | None = None
        self._followed: dict[str, _Followed] = {}
        self.stopping = asyncio.Event()

    async def run(self, work: Callable[[], Any]) -> Any:
        """Call a function in a thread, when few others run."""
        if self._limit is None:
            self._limit = anyio.CapacityLimiter(max(2, min(4, cores())))
        with self.library.requests:
            return await anyio.to_thread.run_sync(work, limiter=self._limit)

    def followed(self) -> list[_Followed]:
        """Return the places that clients watch."""
        return list(self._followed.values())

    def close(self) -> None:
        """End what follows rings, and close the places."""
        for followed in self._followed.values():
            followed.task.cancel()
        self.library.close()

    # -- requests ----------------------------------------------------------------------------

    async def places(self, request: Request) -> Response:
        """List all places."""

        def work() -> dict[str, Any]:
            found = [self.library.brief(place) for place in self.library.places()]
            return {
                "places": found,
                "paths": [str(p) for p in self.library.paths],
            }

        return _json(await self.run(work))

    async def place(self, request: Request) -> Response:
        """Describe one place."""
        return _json(await self.run(lambda: self.library.describe(_text(request, "p"))))

    async def spread(self, request: Request) -> Response:
        """Return lengths and returns over time, and their histograms."""

        def work() -> dict[str, Any]:
            table = self._table(request)
            table.start()
            return table.spread()

        return _json(await self.run(work))

    async def episodes(self, request: Request) -> Response:
        """Return rows of the table."""
        where, sort = request.query_params.get("where", ""), request.query_params.get("sort", "episode")
        start, count = _number(request, "from", 0), _number(request, "n", 100, ROWS)

        def work() -> dict[str, Any]:
            table = self._table(request)
            table.start()
            descending = request.query_params.get("desc") == "1"
            return table.rows(start, count, where, sort, descending)

        return _json(await self.run(work))

    async def episode(self, request: Request) -> Response:
        """Describe one episode, and verify it."""

        def work() -> dict[str, Any]:
            opened, name = self._opened(request), self._episode(request)
            return self._described(opened, name)

        return _json(await self.run(work))

    def _described(self, opened: OpenDataset, name: int) -> dict[str, Any]:
        source, index = opened.source, opened.index
        number = source.number_of(name)
        with index.lock:
            ids, lengths = index.ids, index.lengths
        row = int(np.searchsorted(ids, name))
        if row >= len(ids) or ids[row] != name:
            opened.follow()
            ids, lengths = index.ids, index.lengths
            row = int(np.searchsorted(ids, name))
            if row >= len(ids) or ids[row] != name:
                raise GoneError("this episode was evicted")
        length, damaged = int(lengths[row]), None
        nbytes = length * sum(c.row_nbytes for c in source.columns)
        verified = False
        data: dict[str, Any] = {}
        try:
            if nbytes <= MOST_NBYTES:
                verified = source.verify(name)
            data = {str(n): plain(v) for n, v in source.data(name).items()}
        except GoneError:
            raise
        except (RingmapError, OSError) as error:
            damaged = str(error)
        mark = index.marks.get(name)
        return {
            "id": str(name),
            "episode": number,
            "episodes": len(ids),
            "length": length,
            "data": data,
            "columns": [described(spec) for spec in source.columns],
            "flags": list(mark.flags) if mark else [],
            "note": mark.note if mark else "",
            "damaged": damaged,
            "verified": verified and damaged is None,
            "nbytes": nbytes,
            "before": str(ids[row - 1]) if row else None,
            "after": str(ids[row + 1]) if row + 1 < len(ids) else None,
        }

    async def columns(self, request: Request) -> Response:
        """Return lines of an episode, as binary."""

        def work() -> bytes:
            opened, name = self._opened(request), self._episode(request)
            asked = request.query_params.getlist("c")
            specs = [self._column(opened, column, "lines") for column in asked[:64]]
            start, end = self._range(request, opened, name)
            points = max(2, _number(request, "points", POINTS, POINTS))
            names = [s.name for s in specs]
            if not specs:
                raise InputError("c: the names of columns are missing")

            def read(low: int, high: int) -> dict[str, Any]:
                return opened.source.read(name, low, high, names)

            return lines_of(read, specs, start, end, points)

        return Response(await self.run(work), media_type="application/octet-stream")

    async def frames(self, request: Request) -> Response:
        """Return pictures of an episode from a step on, as binary."""

        def work() -> bytes:
            opened, name = self._opened(request), self._episode(request)
            spec = self._column(opened, _text(request, "c"), "picture")
            start, end = self._range(request, opened, name)
            count = _number(request, "n", 16, FRAMES)
            end = min(end, start + max(1, min(count, MOST_NBYTES // spec.row_nbytes)))
            pictures = opened.source.read(name, start, end, [spec.name])[spec.name]
            exact = request.query_params.get("exact") == "1"
            return packed([encoded(picture, exact) for picture in pictures], start)

        return Response(await self.run(work), media_type="application/octet-stream")

    async def text(self, request: Request) -> Response:
        """Return texts of an episode."""

        def work() -> dict[str, Any]:
            opened, name = self._opened(request), self._episode(request)
            spec = self._column(opened, _text(request, "c"), "text")
            start, end = self._range(request, opened, name)
            end = min(
                end,
                start + _number(request, "n", 200, 2000),
                start + max(1, MOST_NBYTES // 4 // max(1, spec.row_nbytes)),
            )
            values = opened.source.read(name, start, end, [spec.name])[spec.name]
            return {"start": start, "values": [plain(v) for v in values]}

        return _json(await self.run(work))

    async def thumb(self, request: Request) -> Response:
        """Return a small picture of an episode."""

        def work() -> bytes | None:
            if "e" in request.query_params:
                return self._opened(request).thumbnail(self._episode(request))
            shown = self.library.shown(_text(request, "p"))
            return shown.thumbnail() if isinstance(shown, Fleet) else shown.thumbnail(None)

        found = await self.run(work)
        if found is None:
            return Response(status_code=204)
        return Response(found, media_type="image/png" if found[:4] == b"\x89PNG" else "image/jpeg")

    async def download(self, request: Request) -> Response:
        """Return an episode as a file."""

        def work() -> tuple[bytes, str, str]:
            opened, name = self._opened(request), self._episode(request)
            return download(opened, name, _text(request, "as"), request.query_params.get("c"))

        body, kind, filename = await self.run(work)
        headers = {"content-disposition": f'attachment; filename="{filename}"'}
        return Response(body, media_type=kind, headers=headers)

    async def mark(self, request: Request) -> Response:
        """Mark an episode: `{"p": key, "e": id, "flags": [...], "note": "..."}`, either of the last two."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MARK_NBYTES:
                raise TooLargeError(f"a mark of more than {MARK_NBYTES:,} bytes")
        try:
            told = json.loads(body)
            key, name = str(told["p"]), str(told["e"])
            flags, note = told.get("flags"), told.get("note")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InputError('mark: expected {"p": ..., "e": ..., "flags": [...], "note": ...}') from None
        if not (name.isascii() and name.isdigit()) or len(name) > 19:
            raise InputError(f"e: expected a whole number, got {name[:40]!r}")

        def work() -> dict[str, Any]:
            if self.library.read_only:
                raise ReadOnlyError("marks can't be changed: the server was started with --read-only")
            return self.library.open(key).mark(int(name), flags, note)

        return _json(await self.run(work))

    async def events(self, request: Request) -> Response:
        """Send what is stored in a place whenever it changes, until the client goes or the server ends."""
        key = _text(request, "p")
        await self.run(lambda: self.library.place(key))  # that it can't be read is a message: no browser asks again
        followed = self._followed.get(key)
        if followed is None or followed.is_over:
            followed = self._followed[key] = _Followed(self, key)
        return StreamingResponse(followed.told(request), media_type="text/event-stream")

    # -- what a request names ----------------------------------------------------------------

    def _opened(self, request: Request) -> OpenDataset:
        return self.library.open(_text(request, "p"))

    def _table(self, request: Request) -> JoinedTable:
        return self.library.shown(_text(request, "p")).table

    @staticmethod
    def _episode(request: Request) -> int:
        return _number(request, "e", None, 2**62)

    @staticmethod
    def _column(opened: OpenDataset, name: str, kind: str) -> ColumnSpec:
        for spec in opened.source.columns:
            if spec.name == name:
                found, reason = kind_of(spec)
                if found != kind:
                    raise InputError(f"column {name!r} is no {kind}" + (f": {reason}" if reason else ""))
                return spec
        raise UnknownColumnError(f"there is no column {name!r}; there are {[c.name for c in opened.source.columns]}")

    @staticmethod
    def _range(request: Request, opened: OpenDataset, name: int) -> tuple[int, int]:
        number = opened.source.number_of(name)
        ids, lengths = opened.index.ids, opened.index.lengths
        row = int(np.searchsorted(ids, name))
        if row >= len(ids) or ids[row] != name:
            ids, lengths = opened.source.spans()
            row = number
        length = int(lengths[row])
        start, end = _number(request, "start", 0), _number(request, "end", length)
        if not 0 <= start <= end <= length:
            raise InputError(f"steps [{start}, {end}) are out of range: the episode has {length}")
        return start, end


class _Followed:
    """A ring that clients watch: one task polls, and each client is woken to read the newest state."""

    def __init__(self, viewer: Viewer, key: str) -> None:
        self.viewer, self.key = viewer, key
        self.state: dict[str, Any] = {}
        self.changed = asyncio.Event()
        self.clients = 0
        self.is_over = False
        self.task = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        idle = 0
        while True:
            idle = 0 if self.clients else idle + 1
            if idle > _IDLE_POLLS:  # no client can come in between: `events` asks whether the task is done
                self.is_over = True
                return
            try:
                state = await self.viewer.run(lambda: self.viewer.library.follow(self.key))
            except (RingmapError, OSError) as error:
                state = {"problem": str(error)}
            except Exception:
                log.exception("view: following %s", self.key)
                state = {"problem": "can't be read; see the server's log"}
            if state != self.state:
                self.state = state
                self.changed.set()
                self.changed = asyncio.Event()
            await asyncio.sleep(_EVERY_S)

    async def told(self, request: Request) -> AsyncIterator[bytes]:
        self.clients += 1
        if self.is_over:  # it ended after this client was given to it
            self.is_over = False
            self.task = asyncio.create_task(self._poll())
        try:
            said: dict[str, Any] = {}
            while not self.viewer.stopping.is_set():
                changed = self.changed
                if self.state != said:
                    said = self.state
                    yield f"data: {json.dumps(said)}\n\n".encode()
                    continue
                try:
                    await asyncio.wait_for(changed.wait(), _STILL_S)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self.clients -= 1


def _json(value: Any, status: int = 200) -> Response:
    body = json.dumps(value, allow_nan=False).encode()
    if len(body) > MOST_NBYTES:
        raise TooLargeError(f"a reply of {len(body):,} bytes; ask for less")
    return Response(body, status_code=status, media_type="application/json")


def _text(request: Request, name: str) -> str:
    found = request.query_params.get(name)
    if found is None:
        raise InputError(f"{name}: is missing")
    return found


def _number(request: Request, name: str, default: int | None = None, most: int = 2**53) -> int:
    text = request.query_params.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > 19:
        raise InputError(f"{name}: expected a whole number, got {text!r}")
    return min(int(text), most)


_STATUS: tuple[tuple[Any, int], ...] = (
    (GoneError, 410),
    ((TooLargeError, MemoryError), 413),
    (MissingExtraError, 501),
    ((NotFoundError, ReplacedError, ClosedError), 404),  # it is gone, or another one by now
    (InputError, 400),
    (ReadOnlyError, 403),
    (LockedError, 409),
    (EnvironmentFault, 500),
    (OSError, 404),
)
"""Kinds of errors, the first that fits, and the status of the answer."""


async def _refused(request: Request, error: Exception) -> Response:
    """Answer with what went wrong."""
    status = next((code for kinds, code in _STATUS if isinstance(error, kinds)), 500)
    if isinstance(error, DamageError) and request.method == "POST":
        status = 409  # damaged marks are left as they are
    return JSONResponse({"error": str(error) or type(error).__name__}, status)


async def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the server failed; its log says how"}, 500)


def make_app(viewer: Viewer) -> Starlette:
    """Return the application. Who may ask is not its matter: see `Access`."""
    page = {}
    for item in files("ringmap.viewer").joinpath("static").iterdir():
        suffix = item.name.rpartition(".")[2]
        if suffix in _TYPES:
            page[item.name] = item.read_bytes(), _TYPES[suffix]

    async def static(request: Request) -> Response:
        found = page.get(request.path_params.get("name", "index.html"))
        if found is None:
            return JSONResponse({"error": "there is no such page"}, 404)
        return Response(found[0], media_type=found[1])

    get: Mapping[str, Callable[[Request], Awaitable[Response]]] = {
        "places": viewer.places,
        "place": viewer.place,
        "spread": viewer.spread,
        "episodes": viewer.episodes,
        "episode": viewer.episode,
        "columns": viewer.columns,
        "frames": viewer.frames,
        "text": viewer.text,
        "thumb": viewer.thumb,
        "download": viewer.download,
        "events": viewer.events,
    }
    routes = [
        Route("/", static),
        Route("/static/{name}", static),
        *(Route(f"/api/{name}", answer, methods=["GET"]) for name, answer in get.items()),
        Route("/api/mark", viewer.mark, methods=["POST"]),
    ]

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        viewer.close()

    errors: Mapping[Any, Any] = {
        RingmapError: _refused,
        OSError: _refused,
        MemoryError: _refused,
        ValueError: _refused,
        Exception: _failed,
    }
    return Starlette(routes=routes, exception_handlers=errors, lifespan=lifespan)


_FPS, _STRIP = 15, 12


def download(opened: OpenDataset, name: int, kind: str, column: str | None) -> tuple[bytes, str, str]:
    """Return an episode as a file: its bytes, its media type, its name."""
    source = opened.source
    number = source.number_of(name)
    stem = f"episode-{number}"
    _, lengths = source.spans()
    length = int(lengths[min(number, len(lengths) - 1)])
    if kind == "hdf5":
        _small(length, list(source.columns))
        steps: dict[str, Any] = dict(source.read(name, 0, length, [c.name for c in source.columns]))
        data = source.data(name)
        with tempfile.TemporaryDirectory(prefix="ringmap-view-") as folder:
            path = os.path.join(folder, "episode.h5")
            with get_format("hdf5").open_writer(path) as writer:
                writer.write_episode({**steps, **({EPISODE_DATA_KEY: data} if data else {})})
            with open(path, "rb") as file:
                return file.read(), "application/x-hdf5", f"{stem}.h5"
    spec = _pictures(opened, column)
    if kind == "png":
        at = spread(length, _STRIP)
        _small(len(at), [spec])
        pictures = [source.read(name, t, t + 1, [spec.name])[spec.name][0] for t in at]
        return sheet([list(map(shown, pictures))]), "image/png", f"{stem}.png"
    if kind == "mp4":
        _small(length, [spec])
        video = io.BytesIO()
        write_video(video, _FPS, map(shown, source.read(name, 0, length, [spec.name])[spec.name]))
        return video.getvalue(), "video/mp4", f"{stem}.mp4"
    raise InputError(f"as: expected hdf5, mp4 or png, got {kind!r}")


def _pictures(opened: OpenDataset, column: str | None) -> ColumnSpec:
    for spec in opened.source.columns:
        if kind_of(spec)[0] == "picture" and column in (None, spec.name):
            return spec
    raise InputError("there are no pictures" + (f" in a column {column!r}" if column else ""))


def _small(length: int, specs: list[ColumnSpec]) -> None:
    nbytes = length * sum(spec.row_nbytes for spec in specs)
    if nbytes > MOST_NBYTES:
        raise TooLargeError(
            f"an episode of {nbytes:,} bytes; at most {MOST_NBYTES:,} are downloaded: use `ringmap convert`"
        )
