"""A script that writes down what a script can see of its process, for a comparison of launchers."""

from __future__ import annotations

import gc
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import warnings

if __name__ == "__main__":  # a spawned process imports this file again, and would take seconds for them
    import numpy as np
    import torch


class Mine:
    """Is pickled by a spawned process, which imports this file to find it."""

    value = 3


def spawned(queue: multiprocessing.Queue[int], mine: Mine) -> None:
    queue.put(mine.value)


def descriptors() -> list[str]:
    found = []
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            where = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # of the listing itself
        found.append(f"{name} {where.partition(':')[0]}")
    return found


def disposition(number: int) -> str:
    handler = signal.getsignal(number)
    return getattr(handler, "__name__", None) or str(handler)


def facts() -> dict[str, object]:
    main = sys.modules["__main__"]
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[int] = context.Queue()
    opened = descriptors()
    process = context.Process(target=spawned, args=(queue, Mine()))
    process.start()
    answer = queue.get(timeout=60)
    process.join(60)
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:],
        "command line": shown(),
        "path": sys.path,
        "cwd": os.getcwd(),
        "name": __name__,
        "file": __file__,
        "main": {
            "is this": main.__dict__ is globals(),
            "spec": str(main.__spec__.name if main.__spec__ else None),
            "keys": sorted(key for key in vars(main) if key.startswith("__")),
            "package": main.__package__,
            "loader": type(main.__loader__).__name__,
        },
        "spawned": answer,
        "environment": {key: value for key, value in os.environ.items() if key not in CHANGING},
        "descriptors": opened,
        "signals": {number.name: disposition(number) for number in signal.Signals},
        "blocked": [number for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "session": os.getsid(0) == os.getpid() == os.getpgid(0),
        "nice": os.nice(0),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in ("RLIMIT_NOFILE", "RLIMIT_CORE")},
        "umask": os.umask(0o22),
        "threads": threading.active_count(),
        "main thread": threading.current_thread() is threading.main_thread(),
        "torch threads": torch.get_num_threads(),
        "locale": locale.getlocale(),
        "encoding": [sys.stdout.encoding, sys.stderr.encoding, sys.getfilesystemencoding()],
        "written through": [sys.stdout.write_through, sys.stderr.write_through],
        "filters": len(warnings.filters),
        "log handlers": [len(logging.getLogger().handlers), logging.getLogger().level],
        "garbage": [gc.isenabled(), gc.get_threshold()],
        "flags": str(sys.flags),
        "recursion": len(stack()),
        "affinity": sorted(os.sched_getaffinity(0)),
    }


def shown() -> list[str]:
    """What ``ps`` shows."""
    with open("/proc/self/cmdline") as file:
        return file.read().rstrip("\0").split("\0")[1:]


def stack() -> list[object]:
    frame, found = sys._getframe(), []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return found


#: Different in every run, and where our launcher can be reached.
CHANGING = {
    "RESILIENCY_LAUNCHER",
    "RESILIENCY_LAUNCHER_STARTS",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_RESTART_COUNT",
}


if __name__ == "__main__":
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(1))]
    folder = sys.argv[1]
    with open(os.path.join(folder, f"rank-{os.environ['RANK']}.json"), "w") as file:
        json.dump({"facts": facts(), "drawn": drawn}, file)
