"""``python -m resiliency.cli`` is the ``resiliency`` command."""

from __future__ import annotations

import sys

from resiliency.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
