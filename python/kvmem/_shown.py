"""Values in messages."""

from __future__ import annotations

_LENGTH_MOST = 40


def shown(value: object) -> str:
    """A short repr, also of a value that has none, such as an integer of 5000 digits."""
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= _LENGTH_MOST else text[: _LENGTH_MOST - 3] + "..."
