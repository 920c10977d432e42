"""Ranks that stay in their process when a peer dies, with real processes."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL

from resiliency.checkpoint import Checkpointer, checkpointer
from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions
from resiliency.checkpoint.session import Session
from resiliency.errors import ConfigError
from resiliency.launch import AttemptEnded, leaving, restartable, survivor
from resiliency.launch.elastic import StandbyAgent
from resiliency.launch.leaving import (
    child_processes,
    leave_attempt,
    looks_like_a_lost_peer,
    signal_handlers,
    waits_for_peers_only,
)
from resiliency.launch.run import EXIT_GAVE_UP
from resiliency.runtime.channel import pair, send
from resiliency.testing.zygote import Zygote
from tests.launch.launching import ROOT, run_launcher, wait_for
from tests.rings import few

pytestmark = pytest.mark.timeout(180)

#: Rank 1 dies in the first attempts, when the others are about to be at their places.
DYING = """
    import os, signal, sys, threading, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from resiliency.launch import restartable

    def say(*words):  # one write, so that lines of ranks do not mix
        os.write(1, (" ".join(map(str, words)) + "\\n").encode())

    folder = Path(sys.argv[1])

    def wait_for(name):
        deadline = time.monotonic() + 60
        while not (folder / name).exists():
            assert time.monotonic() < deadline, name
            time.sleep(0.005)

    def place(rank, attempt):
{place}

    @restartable
    def main():
        rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        say("rank", rank, "attempt", attempt, "process", os.getpid())
        if attempt == {deaths}:
            dist.init_process_group("gloo")
            total = torch.ones(1)
            dist.all_reduce(total)
            say("rank", rank, "sums", int(total))
            dist.destroy_process_group()
            return
        if rank == 1:
            for other in (0, 2):
                wait_for(f"at-{{other}}-{{attempt}}")
            time.sleep(0.1)  # they are about to be at their places
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / f"at-{{rank}}-{{attempt}}").touch()
        place(rank, attempt)

    main()
    say("the end of", os.environ["RANK"])
"""

PLACES = {
    "asleep": "time.sleep(100)",
    "waiting for an event": "threading.Event().wait()",
    "computing": "while True:\n    sum(range(1000))",
    "going on after errors": "while True:\n    try:\n        time.sleep(100)\n    except Exception:\n        pass",
    "in a clean-up that takes its time": "try:\n    time.sleep(100)\nfinally:\n    time.sleep(0.3)",
    "raising something else": "try:\n    time.sleep(100)\nexcept BaseException:\n    sys.exit(3)",
    "finished in spite of it": "try:\n    time.sleep(100)\nexcept BaseException:\n    pass",
    "reading from nobody": "os.read(os.pipe()[0], 1)",
    "in a callback that lets no exception go on": """
import weakref
class Held: pass
held = Held()
reference = weakref.ref(held, lambda reference: time.sleep(100))
del held
time.sleep(100)
""",
    "in __del__": """
class Held:
    def __del__(self):
        time.sleep(0.5)
        say("taken apart")
held = Held()
del held
time.sleep(100)
""",
    "in a __del__ without end": """
class Held:
    def __del__(self):
        time.sleep(100)
held = Held()
del held
time.sleep(100)
""",
    "importing": """
(folder / f"of_rank_{rank}.py").write_text("import time; time.sleep(0.5); print('> imported whole', flush=True)")
sys.path.insert(0, str(folder))
__import__(f"of_rank_{rank}")
time.sleep(100)
""",
}


def _job(launch: Any, tmp_path: Path, place: str, *flags: Any, deaths: int = 1) -> Any:
    script = textwrap.dedent(DYING).format(place=textwrap.indent(place, "    " * 2), deaths=deaths)
    flags = ("--nproc-per-node", 3, "--max-restarts", deaths, "--crash-loop", 0, *flags)
    return launch(script, *flags, arguments=[tmp_path])


def _processes(text: str) -> dict[int, list[int]]:
    """Of each rank, in order of attempts."""
    found: dict[int, dict[int, int]] = {}
    for rank, attempt, pid in re.findall(r"rank (\d+) attempt (\d+) process (\d+)", text):
        found.setdefault(int(rank), {})[int(attempt)] = int(pid)
    return {rank: [pids[attempt] for attempt in sorted(pids)] for rank, pids in sorted(found.items())}


def test_ranks_that_are_well_stay_wherever_they_are(launch: Any, tmp_path: Path) -> None:
    cases = [
        f"if attempt == {attempt}:  # {name}\n{textwrap.indent(place, '    ')}"
        for attempt, (name, place) in enumerate(PLACES.items())
    ]
    job = _job(launch, tmp_path, "\n".join(cases), deaths=len(PLACES))
    assert job.wait() == 0, job.text
    pids = _processes(job.text)
    assert [len(pids[rank]) for rank in range(3)] == [len(PLACES) + 1] * 3, job.text
    assert [len(set(pids[rank])) for rank in range(3)] == [1, len(PLACES) + 1, 1], job.text
    assert [job.text.count(f"rank {rank} sums 3") for rank in range(3)] == [1, 1, 1], job.text
    assert [job.text.count(f"the end of {rank}") for rank in range(3)] == [1, 1, 1], job.text
    assert job.text.count("the processes of 2 ranks of this host go on") == len(PLACES)
    assert [job.text.count(said) for said in ("taken apart", "> imported whole")] == [2, 2], job.text
    assert "AttemptEnded" not in job.text, job.text


def test_ranks_that_cannot_leave_are_replaced_within_the_attempt(launch: Any, tmp_path: Path) -> None:
    place = """
        if rank == 0:
            import ctypes
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):  # holds the GIL, so that no Python code runs
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        os.kill(os.getpid(), signal.SIGSTOP)
    """
    job = _job(launch, tmp_path, textwrap.dedent(place), "--leave-timeout", 1)
    assert job.wait() == 0, job.text
    pids = _processes(job.text)
    assert [len(set(pids[rank])) for rank in range(3)] == [2, 2, 2], job.text
    assert job.text.count("did not leave its attempt within 1 s, and a new process takes its place") == 2, job.text
    assert job.text.count("sums 3") == 3
    assert job.text.count("was ended by") == 1, job.text  # they do not count as failures


def test_a_rank_that_waits_in_native_code_for_ever_makes_room_at_once(launch: Any, tmp_path: Path) -> None:
    place = """
        import ctypes
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):  # without the GIL, so that other threads run
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    """
    job = _job(launch, tmp_path, textwrap.dedent(place), "--leave-timeout", 80)
    assert job.wait(60) == 0, job.text
    assert job.text.count("this rank is stuck in native code") == 2, job.text
    assert job.text.count("ended when it was to leave its attempt, and a new process takes its place") == 2, job.text
    assert job.text.count("was ended by") == 1, job.text


def test_a_rank_that_computes_in_native_code_is_given_its_time(launch: Any, tmp_path: Path) -> None:
    place = """
        import zlib
        from resiliency.launch import survivor
        survivor._STUCK_S = 0.3
        for _ in range(2):
            zlib.compress(os.urandom(1 << 20) * 60, 9)  # a second without the GIL
        raise AssertionError("not interrupted")
    """
    job = _job(launch, tmp_path, textwrap.dedent(place), "--leave-timeout", 80)
    assert job.wait(60) == 0, job.text
    assert [len(set(pids)) for pids in _processes(job.text).values()] == [1, 2, 1], job.text


def test_what_a_group_waits_for_as_it_ends_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def __del__(self) -> None:
            began.set()
            ends.wait(60)
            ended.set()

    began, ends, ended = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(leaving, "_process_groups", lambda: [Group()])
    leave_attempt(RuntimeError(), children=child_processes(), handlers=signal_handlers())
    assert began.is_set() and not ended.is_set()
    ends.set()
    assert ended.wait(60)


def test_a_rank_that_dies_when_it_is_to_leave_is_replaced_within_the_attempt(launch: Any, tmp_path: Path) -> None:
    job = _job(launch, tmp_path, "try:\n    time.sleep(100)\nfinally:\n    os.kill(os.getpid(), signal.SIGKILL)")
    assert job.wait() == 0, job.text
    pids = _processes(job.text)
    assert [len(set(pids[rank])) for rank in range(3)] == [2, 2, 2], job.text
    assert job.text.count("sums 3") == 3
    assert job.text.count("was ended by") == 1, job.text
    assert "not understood" not in job.text


def test_ranks_that_wait_for_a_dead_one_in_a_collective_leave_it(launch: Any, tmp_path: Path) -> None:
    script = """
        import os, signal, sys
        import torch
        import torch.distributed as dist
        from resiliency.launch import restartable

        def say(*words):  # one write, so that lines of ranks do not mix
            os.write(1, (" ".join(map(str, words)) + "\\n").encode())

        @restartable
        def main():
            rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            say("rank", rank, "attempt", attempt, "process", os.getpid())
            dist.init_process_group("gloo")
            total = torch.ones(1000)
            for step in range(200):
                if attempt < 4 and (rank, step) == (attempt, 50 + attempt):
                    os.kill(os.getpid(), signal.SIGKILL)
                total.fill_(1)
                dist.all_reduce(total)
                assert total.eq(4).all()
            dist.destroy_process_group()

        main()
    """
    job = launch(script, "--nproc-per-node", 4, "--max-restarts", 4, "--crash-loop", 0)
    assert job.wait() == 0, job.text
    # Each rank died once, and stayed in all other attempts.
    assert [len(set(pids)) for pids in _processes(job.text).values()] == [2, 2, 2, 2], job.text


def test_a_rank_in_a_collective_whose_other_ranks_are_alive_and_keep_their_group_is_replaced_within_the_attempt(
    launch: Any, tmp_path: Path
) -> None:
    script = """
        import os, signal, sys, time
        from pathlib import Path
        import torch
        import torch.distributed as dist
        from resiliency.launch import restartable

        folder = Path(sys.argv[1])
        kept = []  # a model or a group in a module, as in many scripts

        @restartable
        def main():
            rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            os.write(1, f"rank {rank} attempt {attempt} process {os.getpid()}\\n".encode())
            dist.init_process_group("gloo")
            kept.append(dist.group.WORLD)
            dist.barrier()
            if attempt == 0:
                if rank == 3:
                    while not (folder / "waits").exists():
                        time.sleep(0.005)
                    os.kill(os.getpid(), signal.SIGKILL)
                if rank == 1:  # its neighbours are ranks 0 and 2, which are well
                    work = dist.all_reduce(torch.ones(1), async_op=True)
                    (folder / "waits").touch()
                    work.wait()
                time.sleep(100)
            total = torch.ones(1)
            dist.all_reduce(total)
            assert int(total) == 4
            dist.destroy_process_group()

        main()
    """
    job = launch(script, "--nproc-per-node", 4, "--max-restarts", 1, arguments=[tmp_path])
    assert job.wait() == 0, job.text
    assert [len(set(pids)) for pids in _processes(job.text).values()] == [1, 2, 1, 2], job.text
    assert "this rank is stuck in native code" in job.text


def run_launcher_that_looks_before_each_death(**arguments: Any) -> None:
    """Rank 1 dies when the launcher has looked, and torch has not yet."""
    looked = StandbyAgent._as_seen
    places = [Path(arguments["cwd"]) / f"at-{rank}" for rank in range(3)]

    def kill_then_look(self: StandbyAgent, codes: Any) -> Any:
        if all(place.exists() for place in places):
            places[0].unlink()
            pid = self._handlers()[1].proc.pid
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return looked(self, codes)

    StandbyAgent._as_seen = kill_then_look  # type: ignore[method-assign]
    run_launcher(**arguments)


def test_ranks_stay_when_another_one_dies_between_two_looks(zygote: Zygote, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import os, time
            from pathlib import Path
            from resiliency.launch import restartable

            @restartable
            def main():
                rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
                os.write(1, f"rank {rank} attempt {attempt} process {os.getpid()}\\n".encode())
                if attempt == 0:
                    Path(f"at-{rank}").touch()
                    time.sleep(100)

            main()
        """)
    )
    output = tmp_path / "output"
    words = ["--nproc-per-node", "3", "--max-restarts", "1", str(script)]
    launcher = zygote.start(
        "tests.launch.test_survivors:run_launcher_that_looks_before_each_death",
        {"words": words, "output": str(output), "cwd": str(tmp_path)},
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    try:
        assert launcher.wait(timeout_s=60) == 0, output.read_text()
    finally:
        launcher.kill()
    assert [len(set(pids)) for _, pids in sorted(_processes(output.read_text()).items())] == [1, 2, 1]


def test_ranks_that_form_a_group_when_a_peer_dies_form_the_next_one(launch: Any, tmp_path: Path) -> None:
    script = """
        import os, signal, sys, time
        from datetime import timedelta
        import torch
        import torch.distributed as dist
        from resiliency.launch import restartable

        @restartable
        def main():
            rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            os.write(1, f"rank {rank} attempt {attempt} process {os.getpid()}\\n".encode())
            if rank == 1 and attempt in (0, 2):
                time.sleep(0.5)  # the others wait for it
                os.kill(os.getpid(), signal.SIGKILL)
            dist.init_process_group("gloo", timeout=timedelta(seconds=40))
            dist.barrier()  # a rank that gloo connects at the moment of a death may have to be replaced
            if rank == 1 and attempt == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
            dist.destroy_process_group()

        main()
    """
    job = launch(script, "--nproc-per-node", 3, "--max-restarts", 3, "--crash-loop", 0)
    assert job.wait() == 0, job.text  # those that waited for it may be other processes now, but cost no restart
    assert len(set(_processes(job.text)[1])) == 4, job.text


def test_ranks_that_are_interrupted_as_they_open_a_checkpointer_leave_its_agent(launch: Any, tmp_path: Path) -> None:
    """A connection that is left open keeps the agent of the attempt before, which refuses the next attempt."""
    script = """
        import os, signal, sys
        import torch.distributed as dist
        from resiliency.agent.client import AgentClient
        from resiliency.checkpoint import Checkpointer
        from resiliency.checkpoint.options import LocalTierOptions
        from resiliency.launch import restartable

        @restartable
        def main():
            rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            os.write(1, f"rank {rank} attempt {attempt} process {os.getpid()}\\n".encode())
            dist.init_process_group("gloo")
            if rank == 1 and attempt < 3:
                AgentClient.open = lambda self: os.kill(os.getpid(), signal.SIGKILL)
            with Checkpointer(LocalTierOptions(directory=sys.argv[1]), rank=rank, world_size=3):
                pass
            dist.destroy_process_group()

        main()
    """
    flags = ["--nproc-per-node", 3, "--max-restarts", 3, "--crash-loop", 0]
    job = launch(script, *flags, arguments=[tmp_path / "checkpoints"])
    assert job.wait() == 0, job.text
    assert len(set(_processes(job.text)[1])) == 4, job.text
    assert "another job" not in job.text


def test_a_rank_that_fails_by_itself_is_a_new_process_and_its_peer_stays(launch: Any) -> None:
    script = """
        import os, sys
        import torch
        import torch.distributed as dist
        from resiliency.launch import restartable

        def say(*words):  # one write, so that lines of ranks do not mix
            os.write(1, (" ".join(map(str, words)) + "\\n").encode())

        @restartable
        def main():
            rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            say("rank", rank, "attempt", attempt, "process", os.getpid())
            dist.init_process_group("gloo")
            dist.barrier()
            if rank == 1:
                raise ValueError(f"wrong in attempt {attempt}")
            dist.barrier()

        main()
    """
    job = launch(script, "--nproc-per-node", 2, "--max-restarts", 1, "--crash-loop", 0)
    assert job.wait() == EXIT_GAVE_UP, job.text
    pids = _processes(job.text)
    assert [len(set(pids[rank])) for rank in (0, 1)] == [1, 2], job.text
    assert [job.text.count(f"[rank1]: ValueError: wrong in attempt {attempt}") for attempt in (0, 1)] == [1, 1], (
        job.text
    )
    assert "rank 1 (process" in job.text and "rank 0 (process" not in job.text
    job.descendants()
    assert job.left() == []


ALONE = """
    import os, signal, sys
    import torch.distributed as dist
    from resiliency.launch import restartable

    @restartable
    def main():
        rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        os.write(1, f"rank {{rank}} attempt {{attempt}} process {{os.getpid()}}\\n".encode())
        signal.signal(signal.SIGTERM, lambda *of: None)  # a flag that is looked at after each step, as in many loops
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 1 and attempt == 0:
            {end}
        dist.barrier()

    main()
"""


def test_ranks_that_lose_a_peer_that_has_not_failed_begin_again(launch: Any) -> None:
    job = launch(ALONE.format(end="sys.exit(0)"), "--nproc-per-node", 3, "--max-restarts", 1)
    assert job.wait() == 0, job.text
    assert [len(set(pids)) for pids in _processes(job.text).values()] == [1, 2, 1], job.text
    assert re.search("ranks? [02].* lost a peer, and no rank of this host has failed", job.text), job.text
    assert "rank 1 has ended with status 0" in job.text, job.text
    assert re.search(r"  rank [02]: \w*Error: .*(peer|[Cc]onnection)", job.text), job.text  # nobody else shows it


@pytest.mark.parametrize("end, named", [("sys.exit(0)", "0"), ('raise ValueError("the reason")', "1")])
def test_ranks_that_lose_a_peer_end_at_once_when_no_restart_is_left(launch: Any, end: str, named: str) -> None:
    job = launch(ALONE.format(end=end), "--nproc-per-node", 2, "--max-restarts", 0)
    assert job.wait() == 1, job.text
    assert f"rank {named} (process" in job.text and "no restarts left" in job.text, job.text
    assert re.search("Error: .*(peer|[Cc]onnection)", job.text), job.text  # rank 0 says what it has lost
    assert "closing signal" not in job.text, job.text  # and was not ended


def test_a_rank_that_has_finished_runs_again_when_another_one_has_not(launch: Any, tmp_path: Path) -> None:
    script = """
        import os, signal, sys, time
        from resiliency.launch import restartable

        def say(*words):  # one write, so that lines of ranks do not mix
            os.write(1, (" ".join(map(str, words)) + "\\n").encode())

        @restartable
        def main():
            rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            say("rank", rank, "attempt", attempt, "process", os.getpid())
            if rank == 1 and attempt == 0:
                deadline = time.monotonic() + 60
                while not os.path.exists(sys.argv[1] + "/finished"):
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)

        main()
        open(sys.argv[1] + "/finished", "w").close()
    """
    job = launch(script, "--nproc-per-node", 2, "--max-restarts", 1, "--crash-loop", 0, arguments=[tmp_path])
    assert job.wait() == 0, job.text
    assert job.text.count("rank 0 attempt 1") == job.text.count("rank 1 attempt 1") == 1, job.text


def test_a_process_that_stays_has_the_environment_files_and_numbers_of_a_new_one(launch: Any, tmp_path: Path) -> None:
    script = """
        import json, os, random, signal, sys, time
        import torch
        import torch.distributed as dist
        from resiliency.launch import restartable

        def say(*words):  # one write, so that lines of ranks do not mix
            os.write(1, (" ".join(map(str, words)) + "\\n").encode())

        os.environ["OF_THE_SCRIPT"] = "kept"
        random.seed(0)
        torch.manual_seed(0)

        @restartable
        def main():
            rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            drawn = [random.random(), torch.rand(1).item()]
            with open(f"{sys.argv[1]}/{rank}-{attempt}", "w") as file:
                json.dump({"variables": dict(os.environ), "drawn": drawn, "process": os.getpid()}, file)
            print("said by", rank, "in", attempt, flush=True)
            print("shouted by", rank, "in", attempt, file=sys.stderr, flush=True)
            dist.init_process_group("gloo")
            if attempt == 0:
                if rank == "1":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(100)

        main()
    """
    flags = ["--nproc-per-node", 2, "--max-restarts", 1, "--log-dir", tmp_path / "logs", "-r", 3]
    job = launch(script, *flags, arguments=[tmp_path])
    assert job.wait() == 0, job.text
    first, stayed, new = (json.loads((tmp_path / name).read_text()) for name in ("0-0", "0-1", "1-1"))
    assert first["process"] == stayed["process"] != new["process"]
    own = {"RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE"}
    for name in (stayed["variables"].keys() | new["variables"].keys()) - own:
        assert stayed["variables"].get(name) == new["variables"].get(name), name
    assert stayed["variables"]["OF_THE_SCRIPT"] == "kept"
    assert stayed["variables"]["TORCHELASTIC_ERROR_FILE"].endswith("attempt_1/0/error.json")
    assert all(a != b for a, b in zip(first["drawn"], stayed["drawn"], strict=True))
    logs = {
        path.relative_to(tmp_path / "logs").parts[1:]: path.read_text()
        for path in (tmp_path / "logs").rglob("std*.log")
    }
    for attempt in (0, 1):
        assert logs[f"attempt_{attempt}", "0", "stdout.log"] == f"said by 0 in {attempt}\n"
        assert f"shouted by 0 in {attempt}" in logs[f"attempt_{attempt}", "0", "stderr.log"]
        assert f"shouted by 0 in {1 - attempt}" not in logs[f"attempt_{attempt}", "0", "stderr.log"]


def test_workers_of_data_loaders_do_not_outlive_their_attempt(launch: Any, tmp_path: Path) -> None:
    script = """
        import os, signal, sys, time
        import torch
        from torch.utils.data import DataLoader
        from resiliency.launch import restartable

        def say(*words):  # one write, so that lines of ranks do not mix
            os.write(1, (" ".join(map(str, words)) + "\\n").encode())

        class Slow(torch.utils.data.Dataset):
            def __len__(self):
                return 100

            def __getitem__(self, index):
                time.sleep(0.02)
                return index

        @restartable
        def main():
            rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
            say("rank", rank, "attempt", attempt, "has", len(children), "children at", time.monotonic())
            if attempt == 2:
                return
            loop = {"iterator": iter(DataLoader(Slow(), num_workers=2, persistent_workers=attempt == 0))}
            loop["itself"] = loop  # as in Lightning: garbage that has to be collected
            for step, _ in enumerate(loop["iterator"]):
                if rank == "1" and step == 3:
                    say("death of attempt", attempt, "at", time.monotonic())
                    os.kill(os.getpid(), signal.SIGKILL)

        main()
    """
    job = launch(script, "--nproc-per-node", 2, "--max-restarts", 2, "--crash-loop", 0)
    assert job.wait() == 0, job.text
    assert "rank 0 attempt 1 has 0 children" in job.text and "rank 0 attempt 2 has 0 children" in job.text, job.text
    for attempt in (0, 1):
        (died,) = re.findall(rf"death of attempt {attempt} at ([\d.]+)", job.text)
        (began,) = re.findall(rf"rank 0 attempt {attempt + 1} has 0 children at ([\d.]+)", job.text)
        assert float(began) - float(died) < MP_STATUS_CHECK_INTERVAL, (
            "an iterator waited for a worker that was not told"
        )
    job.descendants()
    assert job.left() == []


@pytest.mark.parametrize(
    "number", few([signal.SIGTERM, signal.SIGKILL], [signal.SIGKILL]), ids=lambda number: number.name
)
def test_nothing_is_left_of_ranks_that_wait_for_their_next_attempt(
    number: signal.Signals, launch: Any, tmp_path: Path
) -> None:
    script = """
        import os, sys, time
        from resiliency.launch import restartable

        def say(*words):  # one write, so that lines of ranks do not mix
            os.write(1, (" ".join(map(str, words)) + "\\n").encode())

        @restartable
        def main():
            attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            if os.environ["RANK"] == "1":
                if attempt == 2:
                    open(sys.argv[1] + "/fails", "w").write("now")
                sys.exit(1)
            time.sleep(100)

        main()
    """
    # The third attempt waits for ever so long.
    job = launch(script, "--nproc-per-node", 2, "--max-restarts", 9, "--crash-loop", 1000, arguments=[tmp_path])
    wait_for(tmp_path / "fails")
    deadline = time.monotonic() + 30
    while "the next one starts in 2 s" not in job.text:
        assert time.monotonic() < deadline, job.text
        time.sleep(0.01)
    assert any("train.py" in " ".join(process.cmdline()) for process in job.descendants())
    os.kill(job.pid, number)
    job.wait()
    assert job.left() == []


def test_a_death_does_not_end_the_peers_of_a_job_with_no_restart_left_in_silence(launch: Any, tmp_path: Path) -> None:
    job = _job(launch, tmp_path, "time.sleep(100)", "--max-restarts", 0)
    assert job.wait() == 1
    assert "rank 1 (process" in job.text and "SIGKILL" in job.text and "stay" not in job.text
    job.descendants()
    assert job.left() == []


# -- in one process ----------------------------------------------------------------------------------------------------


def test_without_a_launcher_the_function_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESILIENCY_LAUNCHER", raising=False)

    @restartable
    def add(left: int, *, right: int) -> int:
        """Adds."""
        return left + right

    assert add(1, right=2) == 3 and add.__name__ == "add" and add.__doc__ == "Adds."
    with pytest.raises(ZeroDivisionError):
        restartable(lambda: 1 / 0)()


def test_a_launcher_that_is_gone_is_said_and_the_function_is_called(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RESILIENCY_LAUNCHER", "resiliency-run-nobody")
    assert restartable(lambda: 5)() == 5
    assert "the launcher cannot be reached" in caplog.text


class _Model:
    def handle(self, number: int, frame: Any) -> None: ...


def test_what_frames_of_an_attempt_held_is_gone_when_it_was_left() -> None:
    held: list[weakref.ref[_Model]] = []

    def train(model: _Model) -> None:
        held.append(weakref.ref(model))
        model.itself = model  # type: ignore[attr-defined]
        try:
            raise RuntimeError("gloo: connection closed by peer")
        except RuntimeError as error:
            raise AttemptEnded("told") from error

    gc.disable()
    try:
        try:
            train(_Model())
        except AttemptEnded as error:
            leave_attempt(error, children=leaving.child_processes(), handlers=leaving.signal_handlers())
        assert held[0]() is None
    finally:
        gc.enable()


def _threads() -> list[str]:
    return sorted(one.name for one in threading.enumerate() if one.name.startswith("resiliency-"))


@pytest.fixture
def joined() -> Iterator[tuple[survivor._Survivor, socket.socket]]:
    """A rank in this process, and its launcher's end."""
    mine, launcher = pair()
    with mine, launcher:
        yield survivor._Survivor(mine), launcher


def _start(launcher: socket.socket, number: int) -> None:
    send(launcher, {"kind": "start", "number": number, "environment": {}})


def test_an_attempt_finds_its_thread_and_process_as_the_one_before_found_them(
    joined: tuple[survivor._Survivor, socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that is a new process finds them so, too; a context manager that was entered may never be left."""
    monkeypatch.chdir(tmp_path)
    rank, launcher = joined
    kept: list[Any] = []

    def found() -> dict[str, Any]:
        depth = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        return {
            "folder": os.getcwd(),
            "umask": re.findall("Umask.*", Path("/proc/self/status").read_text()),
            "timer": signal.getitimer(signal.ITIMER_PROF),
            "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            "streams": (sys.stdout, sys.stderr, sys.excepthook),
            "grad": torch.is_grad_enabled(),
            "dtype": torch.get_default_dtype(),
            "device": torch.get_default_device(),
            "modes": torch._C._len_torch_function_stack(),
            "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), depth),
        }

    def function() -> dict[str, Any]:
        if kept:
            send(launcher, {"kind": "exit", "number": 0})
            return found()
        kept.append(found())
        (tmp_path / "sub").mkdir()
        os.chdir(tmp_path / "sub")
        signal.signal(signal.SIGPROF, lambda *arguments: None)
        signal.setitimer(signal.ITIMER_PROF, 60)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        os.umask(0o777)
        sys.excepthook = lambda *arguments: None
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        for context in (torch.autocast("cpu", torch.float16), torch.device("meta")):
            context.__enter__()
            kept.append(context)
        with open(os.devnull, "w") as sys.stdout:
            telling.start()
            threading.Event().wait(60)
        raise AssertionError("it was not told to leave")

    def tell() -> None:
        """In a thread, which is not interrupted between two of them."""
        send(launcher, {"kind": "leave", "number": -1})
        _start(launcher, 0)

    telling = threading.Thread(target=tell)
    assert rank.run(function) == kept[0]
    telling.join(60)


@pytest.mark.parametrize("kind", ["async def main(): pass", "def main(): yield", "async def main(): yield"])
def test_a_function_that_a_call_does_not_run_is_refused(kind: str) -> None:
    names: dict[str, Any] = {}
    exec(kind, names)
    with pytest.raises(ConfigError, match=r"restartable\(main\).*plain function"):
        restartable(names["main"])


def test_threads_and_files_of_a_checkpointer_that_was_interrupted_twice_as_it_opened_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*, session: Session, coordinator: Any) -> None:
        session.events.emit("test")  # the log opens its file and its thread at the first event
        raise AttemptEnded("told")

    class InterruptedAgain(checkpointer.Copier):
        def close(self) -> None:  # else the checkpointer closes what it has opened
            raise AttemptEnded("told")

    monkeypatch.setattr(checkpointer, "SaveTracker", interrupted)
    monkeypatch.setattr(checkpointer, "Copier", InterruptedAgain)
    before = _threads()
    options = CheckpointerOptions(events_dir=str(tmp_path / "log"))
    try:
        Checkpointer(LocalTierOptions(directory=str(tmp_path / "steps")), options=options).open()
    except AttemptEnded as error:
        assert {"resiliency-agent-link", "resiliency-copy", "resiliency-events"} <= set(_threads())
        leave_attempt(error, children=child_processes(), handlers=signal_handlers())
    assert _threads() == before
    assert not [
        path for path in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if path.startswith(str(tmp_path))
    ]


def test_handlers_of_signals_that_an_attempt_has_set_are_taken_back() -> None:
    before = leaving.signal_handlers()
    model = _Model()
    held = weakref.ref(model)
    signal.signal(signal.SIGTERM, model.handle)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        del model
        leave_attempt(AttemptEnded("told"), children=leaving.child_processes(), handlers=before)
        assert leaving.signal_handlers() == before
        assert held() is None
    finally:
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, before[number])


@pytest.mark.parametrize(
    ("path", "lost"),
    [("/site/torch/distributed/rendezvous.py", True), ("/job/data.py", False), ("/site/aiohttp/client.py", False)],
)
def test_a_lost_connection_is_a_peers_where_it_was_one_to_a_peer(path: str, lost: bool) -> None:
    try:
        exec(compile("raise ConnectionResetError('reset by peer')", path, "exec"), {})
    except ConnectionResetError as error:
        assert looks_like_a_lost_peer(error) is lost


@pytest.mark.parametrize(
    ("name", "only"),
    [
        ("distributed/distributed_c10d.py", True),
        ("distributed/rendezvous.py", False),
        ("autograd/graph.py", True),
        ("utils/data/dataloader.py", False),
        ("nn/functional.py", False),
        ("../torchvision/distributed/io.py", False),
    ],
)
def test_where_a_rank_waits_for_nothing_but_its_peers(name: str, only: bool) -> None:
    path = os.path.normpath(os.path.join(os.path.dirname(torch.__file__), name))
    there: dict[str, Any] = {}
    exec(compile("import sys; frame = sys._getframe()", path, "exec"), there)
    assert waits_for_peers_only(there["frame"]) is only
    assert not waits_for_peers_only(sys._getframe()) and not waits_for_peers_only(None)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1"), True),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), True),
        (RuntimeError("Broken pipe"), True),
        (RuntimeError("[c10d] Timed out waiting 30000ms for recv operation to complete"), True),
        (RuntimeError("cannot restore state: size mismatch for layer 3"), False),
        (RuntimeError("the datastore is empty"), False),
        (RuntimeError("websocket token expired"), False),
        (ConnectionRefusedError("data server db7:5432 refused"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("a gloo of mine"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_that_a_lost_peer_causes(error: BaseException, lost: bool) -> None:
    assert looks_like_a_lost_peer(error) is lost
    caused = KeyError("in a callback")
    caused.__context__ = error
    assert looks_like_a_lost_peer(caused) is lost
