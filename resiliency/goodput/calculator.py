"""``python -m resiliency.goodput.calculator``: see :mod:`resiliency.compat.goodput_calculator`."""

from __future__ import annotations

import sys

from resiliency.compat.goodput_calculator import GoodputCalculator, get_parser, main

__all__ = ["GoodputCalculator", "get_parser", "main"]

if __name__ == "__main__":
    sys.exit(main())
