"""``resiliency run --spares`` with launchers that train nothing: arguments are the state folder, a file that ends the
ranks, hosts, fewest hosts, and whether hosts have network namespaces. A process of its own, because it takes the signals."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from resiliency.settings import child_environment
from resiliency.testing.hosts import local_cluster
from resiliency.testing.hosts.local_processes import LocalProcess


def main() -> int:
    state, finished, hosts, fewest, namespaces = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    launcher = str(Path(__file__).parents[2] / "quick_launcher.py")
    local_cluster._LOOKS = (1.5, 3.0)
    local_cluster._NO_HOSTS_S = 5.0
    start = local_cluster.start

    def start_with_quick_launcher(name, number, words, variables, fds=()):
        if words[0] != "host-monitor":
            return start(name, number, words, variables, fds)
        code = (
            "import sys; from resiliency.monitor import settings as m;"
            f"m.launcher_command = lambda *a, **k: (sys.executable, '-S', '-E', {launcher!r}, '{{endpoint}}',"
            f" {finished!r}); from resiliency.cli.host_monitor import main; sys.exit(main(sys.argv[2:]))"
        )
        popen = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            env=child_environment() | dict(variables),
            start_new_session=True,
            pass_fds=fds,
        )
        return LocalProcess(name, number, popen, os.pidfd_open(popen.pid))

    local_cluster.start = start_with_quick_launcher
    cluster = local_cluster.LocalCluster(
        hosts=int(hosts),
        min_hosts=int(fewest),
        spares=0,
        ranks_per_host=1,
        script=("train.py",),
        workload={"dwell_s": 0.2},
        state_dir=state,
        network_namespaces=namespaces == "True",
    )
    return local_cluster.run_local_cluster(cluster)


sys.exit(main())
