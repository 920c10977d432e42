"""What is installed is looked up once in a process: each Trainer asks, which reads a file of every distribution.

Takes effect when it is imported before Lightning.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

_of_all = functools.cache(importlib.metadata.entry_points)


def _entry_points(**params: Any) -> Any:
    return _of_all().select(**params) if params else _of_all()


_of_all()
importlib.metadata.entry_points = _entry_points
