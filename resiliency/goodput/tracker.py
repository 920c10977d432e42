"""``python -m resiliency.goodput.tracker``: see :mod:`resiliency.compat.goodput_tracker`."""

from __future__ import annotations

import sys

from resiliency.compat.goodput_tracker import GoodputLogger, get_parser, main

__all__ = ["GoodputLogger", "get_parser", "main"]

if __name__ == "__main__":
    sys.exit(main())
