"""``python -m resiliency.agent``: the host agent process; started by the trainer, not by hand."""

import sys

from resiliency.agent.server import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
