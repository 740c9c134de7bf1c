"""`ringmap info` and `ringmap formats`: what a buffer or a dataset holds, and what each format can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringmap.buffers.opening import DATASET, EPISODES, FLEET, kind_of
from ringmap.cli.arguments import AsJson, Place
from ringmap.cli.console import count, nbytes, percent, show, show_json, show_table

if TYPE_CHECKING:
    from ringmap.storage.inspect.describe import Facts, WriterFacts


def info(path: Place, as_json: AsJson = False) -> None:
    """Say what a buffer or a dataset holds.

    Of a buffer: its columns, how full it is, what it takes on disk, and who writes it. It is read as any live reader
    reads it: a writer may be at work. Of a dataset: its columns, episodes and steps. Of a directory with buffers below
    it: a table of these, and the total.
    """
    kind = kind_of(path, "info")
    if kind == FLEET:
        _show_rings(path, as_json)
        return
    if kind == DATASET:
        _show_dataset(path, as_json)
        return
    from ringmap.storage.inspect.describe import facts_of

    facts, episodic = facts_of(path), kind == EPISODES
    described: dict[str, Any] = {
        "path": path,
        "kind": kind,
        "format": "ringmap",
        "format_version": facts.version,
        "uuid": facts.uuid,
        "capacity": facts.capacity,
        "max_steps": facts.max_steps,
        "steps": facts.steps,
        "steps_written": facts.steps_written,
        "pending": facts.pending,
        "episodes": len(facts.lengths) if episodic else None,
        "commits": facts.commits,
        "lengths": _spread(facts.lengths) if episodic else None,
        "settings": facts.settings,
        "nbytes": facts.nbytes,
        "nbytes_full": facts.nbytes_full,
        "writer": {
            "alive": facts.writer.alive,
            "pid": facts.writer.pid,
            "host": facts.writer.host,
            "since": facts.writer.since,
        },
        "columns": [
            {"name": c.name, "dtype": c.dtype, "shape": list(c.shape), "storage": c.storage, "codecs": list(c.codecs)}
            for c in facts.columns
        ],
    }
    if as_json:
        show_json(described)
        return
    _show_buffer(described, facts)


def _show_rings(path: str, as_json: bool) -> None:
    from ringmap.cli.watch import HEADER, NUMBERS, cells, opened, total

    with opened(path) as buffer:
        facts = total(path, buffer.shards)
    if as_json:
        show_json(facts)
        return
    show_table(HEADER, cells(facts), NUMBERS)


def _spread(lengths: Any) -> dict[str, Any] | None:
    import numpy as np

    if not len(lengths):
        return None
    return {
        "least": int(lengths.min()),
        "median": float(np.median(lengths)),
        "most": int(lengths.max()),
    }


def _show_buffer(described: dict[str, Any], facts: Facts) -> None:
    settings, capacity = facts.settings, described["capacity"]
    stored = min(facts.steps, capacity)
    episodic = described["kind"] == EPISODES
    show(f"{described['path']}: buffer of {described['kind']}, format version {facts.version}")
    filled = f"{count(stored)} of {count(capacity, 'step' if episodic else 'row')}, {percent(stored, capacity)}"
    _fact("fill", filled + (f"; {count(len(facts.lengths), 'episode')}" if episodic else ""))
    gone = facts.steps_written - stored
    _fact("written", f"{count(facts.steps_written)} so far, of which {count(gone)} are gone")
    if facts.pending:
        dead = facts.writer.alive is False
        when = "; the next writer commits them when it opens the buffer" if dead else ""
        _fact("pending", f"{count(facts.pending, 'row')} not committed yet{when}")
    if episodic and described["lengths"]:
        least, median, most = described["lengths"].values()
        _fact("lengths", f"{least:,} to {most:,}, median {median:,g}")
    if episodic:
        _fact(
            "clips",
            f"history_len {settings.get('history_len')}, frameskip {settings.get('frameskip')}",
        )
    seconds = settings.get("sync_every_s")
    synced = "each commit is synced" if settings.get("durability") == "power" else f"synced every {seconds} s"
    _fact("durability", f"{settings.get('durability')}: {synced}")
    most = described["nbytes_full"]
    full = "" if most is None else f"; at most about {nbytes(most)}"
    _fact("on disk", f"{nbytes(described['nbytes'])}{full}")
    _fact("writer", _writer(facts.writer))
    _fact("uuid", facts.uuid)
    if not facts.columns:
        _fact("columns", "none before the first episode")
        return
    show()
    rows = [(c.name, c.dtype, _shape(c.shape), " ".join((c.storage, *c.codecs))) for c in facts.columns]
    show_table(("column", "dtype", "shape", "storage"), rows)


def _writer(writer: WriterFacts) -> str:
    who = f"process {writer.pid} on {writer.host} since {writer.since}"
    if writer.alive:
        return f"alive: {who}" if writer.pid is not None else "alive"
    if writer.alive is None:
        return f"unknown: {who} may be"
    return f"none; the last was {who}" if writer.pid is not None else "none"


def _fact(name: str, value: object) -> None:
    show(f"  {name:<11} {value}")


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) if shape else "-"


def _show_dataset(path: str, as_json: bool) -> None:
    from ringmap.formats.catalog.load import load_arrays
    from ringmap.formats.registry import detect_format
    from ringmap.storage.inspect.describe import nbytes_of

    dataset = load_arrays(path)
    at = str(getattr(dataset, "path", path))
    detected = detect_format(at)
    lengths = dataset.lengths
    described: dict[str, Any] = {
        "path": path,
        "kind": "dataset",
        "format": None if detected is None else detected.name,
        "episodes": len(lengths),
        "steps": int(lengths.sum()),
        "lengths": _spread(lengths),
        "nbytes": nbytes_of(at),
        "columns": _columns(dataset),
        "episode_data": list(dataset.episode_column_names),
    }
    if as_json:
        show_json(described)
        return
    show(f"{path}: dataset, format {described['format']}")
    _fact("episodes", count(len(lengths)))
    _fact("steps", count(described["steps"]))
    if described["lengths"]:
        least, median, most = described["lengths"].values()
        _fact("lengths", f"{least:,} to {most:,}, median {median:,g}")
    _fact("on disk", nbytes(described["nbytes"]))
    if described["episode_data"]:
        _fact("data", ", ".join(described["episode_data"]))
    show()
    rows = [(c["name"], c["dtype"], _shape(tuple(c["shape"]))) for c in described["columns"]]
    show_table(("column", "dtype", "shape"), rows)


def _columns(dataset: Any) -> list[dict[str, Any]]:
    from ringmap.storage.columns.schema import Schema, as_columns

    schema = getattr(dataset, "schema", None)
    if not isinstance(schema, Schema):  # of a third party: its first episode tells
        if not len(dataset.lengths):
            return [{"name": name, "dtype": "?", "shape": []} for name in dataset.column_names]
        schema = Schema.of(as_columns(dict(dataset.load_episode(0)), "info"))
    return [{"name": c.name, "dtype": str(c.dtype), "shape": list(c.shape)} for c in schema.columns]


def formats(as_json: AsJson = False) -> None:
    """List the formats of datasets, and what each can do.

    Lossless: what is written comes back bit for bit, pictures too, without any option.
    """
    from ringmap.formats.registry import describe_formats

    found = describe_formats()
    if as_json:
        show_json(
            [
                {
                    "name": f.name,
                    "reads": f.reads,
                    "writes": f.writes,
                    "appends": f.appends,
                    "lossless": f.lossless,
                    "installed": f.available,
                    "install": f.install,
                }
                for f in found
            ]
        )
        return
    rows = [
        (
            f.name,
            _word(f.reads),
            _word(f.writes),
            _word(f.appends),
            _word(f.lossless),
            "yes" if f.available else f'pip install "{f.install}"' if f.install else "no",
        )
        for f in found
    ]
    show_table(("format", "read", "write", "append", "lossless", "installed"), rows)


def _word(answer: bool | None) -> str:
    return {True: "yes", False: "no", None: "-"}[answer]
