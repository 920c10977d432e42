"""By how much longer than on an idle desk tests wait for something: ``RESILIENCY_TESTS_PATIENCE``, 1 by default.

Waits that must end, and pytest's limits, are multiplied by it; nothing that a test measures is.
"""

from __future__ import annotations

import os

__all__ = ["PATIENCE"]

PATIENCE = float(os.environ.get("RESILIENCY_TESTS_PATIENCE", "1"))
