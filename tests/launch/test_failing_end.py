"""What a script sees of its end when it fails: in a forked rank as in a fresh interpreter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launching import Job

pytestmark = pytest.mark.timeout(120)

FAILING = """
    import atexit, ctypes, multiprocessing, os, sys, threading, time, weakref

    class Held:
        pass

    def slow():
        time.sleep(0.3)
        print("> a thread that is waited for", flush=True)

    held = Held()
    weakref.finalize(held, print, "> a finalizer")
    atexit.register(print, "> an exit handler")
    threading.Thread(target=slow).start()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    child.start()
    sys.stdout.reconfigure(write_through=False, line_buffering=False)
    print("> child", child.pid)
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    buffer = ctypes.c_void_p(library.malloc(4096))  # ranks start without one
    library.setvbuf(ctypes.c_void_p.in_dll(library, "stdout"), buffer, 0, 4096)
    library.printf(b"> of a library\\n")
    if {hook}:
        sys.excepthook = lambda kind, error, trace: print("> a hook of the script:", kind.__name__, error)
    sys.stderr.write("> to standard error\\n")
    {ending}
"""


def _lines(job: Job) -> list[str]:
    return sorted(re.sub(r"child \d+", "child", line) for line in job.text.splitlines() if line.startswith("> "))


@pytest.mark.parametrize("hook", [True, False])
def test_a_failing_rank_does_all_that_an_interpreter_does_at_its_end(launch: Any, tmp_path: Path, hook: bool) -> None:
    script = FAILING.format(hook=hook, ending='raise ValueError("the reason")')
    jobs = [launch(script, "--nproc-per-node", 1, *more) for more in ((), ("--no-standby",))]
    codes = [job.wait() for job in jobs]
    assert codes == [1, 1]
    forked, fresh = jobs
    assert "fresh interpreters" not in forked.text
    assert len(_lines(fresh)) == 6 + hook
    assert _lines(forked) == _lines(fresh)
    for job in jobs:
        assert ("ValueError: the reason" in job.text) or hook
        child = int(re.findall(r"child (\d+)", job.text)[0])
        assert not Path("/proc", str(child)).exists()


def test_a_hook_that_fails_itself_hides_nothing(launch: Any) -> None:
    script = """
        import atexit, sys
        def hook(*error):
            raise RuntimeError("in the hook")
        sys.excepthook = hook
        atexit.register(print, "> an exit handler")
        raise ValueError("the reason")
    """
    job = launch(script, "--nproc-per-node", 1)
    assert job.wait() == 1
    assert "RuntimeError: in the hook" in job.text and "the reason" in job.text
    assert _lines(job) == ["> an exit handler"]
