"""The status page: one HTML document that loads nothing from anywhere. Needs jinja2 (extra ``supervisor``)."""

from __future__ import annotations

from typing import Any

__all__ = ["render_page"]


def render_page(status: dict[str, Any], events: list[dict[str, Any]]) -> str:
    """Args: of :mod:`resiliency.supervisor.views`; events: oldest first."""
    return "<!doctype html><title>supervisor</title>" + str(len(events)) + str(status["term"])
