"""Fits of this folder run as those of the callbacks' tests do."""

from __future__ import annotations

from tests.callbacks.conftest import one_thread, quiet

__all__ = ["one_thread", "quiet"]
