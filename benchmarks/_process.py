"""Runs one contender in a process of its own and returns the JSON it wrote.

Each run has a process group, a deadline, a folder and a mark in its environment. However it ends, every process
that carries the mark is killed and everything it left in shared memory under that mark is removed, so no contender
affects the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks._memory import MARK, marked

__all__ = ["run_contender"]

_SWEEPS = 5
_GONE_S = 10.0
_ROOT = Path(__file__).resolve().parent.parent


def run_contender(
    module: Sequence[str],
    spec: Mapping[str, Any],
    *,
    folder: Path,
    deadline: timedelta,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs ``python -m <module> SPEC_FILE`` and returns what it wrote to ``spec["result"]``.

    Args:
        module: arguments after ``python -m``; the path of the spec file is appended.
        spec: what the contender is to do; ``folder``, ``result`` and ``mark`` are added.
        folder: parent of the scratch folder, which is removed at the end.
        deadline: after this the run is killed and counts as failed.
        env: variables added to the environment; ``{mark}`` in a value becomes the mark of the run.

    Returns:
        The result, or ``{"error": one line}`` for a run that failed or ran out of time; never raises for those.

    Blocks: up to ``deadline`` and the few seconds of the clean-up.
    """
    mark = uuid.uuid4().hex[:12]
    scratch = Path(tempfile.mkdtemp(prefix=f"run-{mark}-", dir=folder))
    result, log = scratch / "result.json", scratch / "log.txt"
    full = {**spec, "folder": str(scratch / "data"), "result": str(result), "mark": mark}
    (scratch / "data").mkdir()
    (scratch / "spec.json").write_text(json.dumps(full))
    environment = {
        **os.environ,
        MARK: mark,
        "MASTER_ADDR": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")])),
        **{name: value.format(mark=mark) for name, value in (env or {}).items()},
    }
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *module, str(scratch / "spec.json")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=scratch,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(timeout=deadline.total_seconds())
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process, mark)
        if result.exists():
            return dict(json.loads(result.read_text()))
        what = (
            f"ran past its deadline of {deadline.total_seconds():.0f} s" if code is None else f"ended with code {code}"
        )
        return {"error": f"{what}; last error: {_last_error(log)}"}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        _remove_shared_memory(mark)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kills the process group, then every process with the mark until there is none; waits for each to end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(_SWEEPS):  # a process that was being started during one pass is found by the next
        pids = list(marked(mark))
        if not pids:
            return
        for pid in pids:
            _kill(pid)


def _kill(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        select.select([handle], [], [], _GONE_S)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def _remove_shared_memory(mark: str) -> None:
    for path in [*Path("/dev/shm").glob(f"*{mark}*"), *Path(tempfile.gettempdir()).glob(f"*/{mark}")]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error" in line]
    return (errors or lines or ["(nothing)"])[-1][:300]
