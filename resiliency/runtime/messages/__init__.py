"""What supervisor, host monitor and launcher tell each other: one class a message, checked field by field."""

from __future__ import annotations

__all__: list[str] = []
