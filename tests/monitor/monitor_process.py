"""A host monitor as a process of its own, with a launcher of the test: what ``resiliency host-monitor`` is but for that.

Arguments: JSON of the fields of the settings, the supervisor's address, the token file.
"""

import asyncio
import json
import logging
import signal
import sys

from resiliency.monitor.connection import ConnectionSettings
from resiliency.monitor.host_monitor import HostMonitor
from resiliency.monitor.settings import MonitorSettings


async def main() -> int:
    fields, url, token_file = sys.argv[1:]
    given = json.loads(fields)
    settings = MonitorSettings(**{**given, "command": tuple(given["command"])})
    monitor = HostMonitor(settings, ConnectionSettings(urls=(url,), token_file=token_file))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, monitor.stop)
    return await monitor.run()


logging.basicConfig(level=logging.INFO)
sys.exit(asyncio.run(main()))
