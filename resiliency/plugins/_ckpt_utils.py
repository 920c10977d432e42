"""The import path of these functions in an older library; see :mod:`resiliency.compat.latest`."""

from __future__ import annotations

from resiliency.compat.latest import find_latest_checkpoint_path, get_is_checkpoint_file_handler

__all__ = ["find_latest_checkpoint_path", "get_is_checkpoint_file_handler"]
