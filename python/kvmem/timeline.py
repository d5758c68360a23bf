"""The timeline as a trace that ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ._core import TimelineRecord

_STAGES = (
    ("queue", "requested", "started"),
    ("copy", "started", "completed"),
    ("observe", "completed", "observed"),
)
_MEASURED_ONLY = (("queue", "requested", "submitted"), ("guard", "submitted", "observed"))


def to_perfetto(records: Iterable[TimelineRecord], path: str | Path) -> None:
    """Writes the records of Manager.timeline() as Chrome JSON trace events, times in microseconds.

    One track for each kind of transfer and stage; first uses are instants. With the timeline off
    the copy itself was not measured, so its span is that from submission to observation.
    """
    events: list[dict[str, Any]] = []
    for record in records:
        stages = (
            _STAGES
            if record.started is not None and record.completed is not None
            else _MEASURED_ONLY
        )
        shared = {"pid": record.kind, "cat": record.priority}
        facts = {
            "id": record.id,
            "state": record.state,
            "blocks": record.blocks,
            "bytes": record.bytes,
        }
        for name, begin, end in stages:
            start, stop = getattr(record, begin), getattr(record, end)
            if start is None or stop is None:
                continue
            events.append(
                shared
                | {"name": name, "ph": "b", "ts": start * 1e6, "id": record.id, "args": facts}
            )
            events.append(shared | {"name": name, "ph": "e", "ts": stop * 1e6, "id": record.id})
        if record.first_use is not None:
            events.append(
                shared
                | {"name": "first use", "ph": "i", "s": "p", "ts": record.first_use * 1e6, "tid": 0}
            )
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
