"""What a script sees of its end when it fails: in a forked rank as in a fresh interpreter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from resiliency.launch.run import EXIT_GAVE_UP
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


@pytest.mark.parametrize(
    "ending, told",
    [
        ('raise ValueError("the reason\\nand more")', "ValueError: the reason"),
        ('sys.exit("no data")', "SystemExit: no data"),
    ],
)
def test_the_launcher_says_why_a_rank_has_failed(launch: Any, ending: str, told: str) -> None:
    job = launch(f"import sys\n{ending}", "--nproc-per-node", 1)
    assert job.wait() == 1
    assert re.search(rf"rank 0 \(process \d+\) exited with 1 .* after the start of attempt 0: {told}; ", job.text), (
        job.text
    )


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


FALLING = """
    import os, signal, sys, time
    from pathlib import Path

    marks = Path(sys.argv[1])
    rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]

    def wait_for(path):
        deadline = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < deadline, path
            time.sleep(0.005)

    if rank == 0:  # it misses its peer soon, and would answer SIGTERM with a long wait, as Lightning does
        signal.signal(signal.SIGTERM, lambda *of: time.sleep(100))
        (marks / f"handles-{attempt}").touch()
        wait_for(marks / f"fails-{attempt}")
        time.sleep(0.2)
        raise RuntimeError("Connection closed by peer")
    wait_for(marks / f"handles-{attempt}")
    (marks / f"fails-{attempt}").touch()
    raise ValueError("the reason")
"""


def test_peers_that_fall_by_themselves_are_not_told_to_end_and_not_named(launch: Any, tmp_path: Path) -> None:
    job = launch(FALLING, "--nproc-per-node", 2, "--max-restarts", 1, "--crash-loop", 0, arguments=[tmp_path])
    assert job.wait() == EXIT_GAVE_UP, job.text
    assert "closing signal" not in job.text, job.text
    named = re.findall(r"rank (\d) \(process \d+\) exited with 1 .* after the start of attempt (\d)", job.text)
    assert named == [("1", "0"), ("1", "1")], job.text
    of_torch = re.findall(r"failed \(exitcode: 1\) local_rank: (\d)", job.text)
    assert of_torch == ["1", "1"], job.text
