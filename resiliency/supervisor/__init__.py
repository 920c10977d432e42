"""Notices that a training job has failed, decides what to do about it, and does it once."""

from __future__ import annotations

__all__: list[str] = []
