"""``resiliency run`` with real processes: what ranks see, and what happens when something dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from resiliency.launch.run import EXIT_GAVE_UP
from resiliency.runtime import processes
from resiliency.testing.zygote import Zygote
from tests.launch import facts as facts_script
from tests.launch.launching import ROOT, Job, wait_for
from tests.ports import free_port
from tests.processes import wait_ended

pytestmark = pytest.mark.timeout(180)


# -- a rank is what it is under torchrun -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> dict[str, list[dict[str, Any]]]:
    """What two ranks of a script see under torchrun, under us, and under us after a restart."""
    script = Path(facts_script.__file__)
    found = {}
    for name in ("torchrun", "ours, not forked"):
        folder = tmp_path_factory.mktemp(name)
        (folder / "out").mkdir()
        # Numpy's generator is made when its module is imported: all ranks would have one.
        flags = [] if name == "torchrun" else ["--preload", "numpy.random"]
        job = Job(name, ["--nproc-per-node", 2, *flags, script, "out"], folder / "log", zygote, cwd=folder)
        try:
            assert job.wait() == 0, job.text
            assert "fresh interpreter" not in job.text
        finally:
            job.close()
        texts = [(folder / "out" / f"rank-{rank}.json").read_text() for rank in (0, 1)]
        found[name] = [json.loads(text.replace(str(folder), "FOLDER")) for text in texts]
    return found


def test_a_forked_rank_sees_what_a_rank_of_torchrun_sees(seen: dict[str, list[dict[str, Any]]]) -> None:
    for theirs, ours in zip(seen["torchrun"], seen["ours, not forked"], strict=True):
        for name in theirs["facts"].keys() - {"filters", "recursion"}:
            assert ours["facts"][name] == theirs["facts"][name], name
        # Modules that are imported in advance set filters; the frames are those of the fork.
        assert 0 <= ours["facts"]["filters"] - theirs["facts"]["filters"] <= 5
        assert ours["facts"]["recursion"] - theirs["facts"]["recursion"] <= 5


def test_no_two_ranks_draw_the_same_random_numbers(seen: dict[str, list[dict[str, Any]]]) -> None:
    drawn = [tuple(rank["drawn"]) for ranks in seen.values() for rank in ranks]
    for source in zip(*drawn, strict=True):
        assert len(set(source)) == len(drawn)


ENDS = {
    "with a status": ("import sys; sys.exit(7)", 7),
    "with a text": ("import sys; sys.exit('gone')", 1),
    "by an exception": ("def f():\n    raise ValueError('what is wrong')\nf()", 1),
    "by a signal": ("import os, signal; os.kill(os.getpid(), signal.SIGUSR1)", -signal.SIGUSR1),
    "at once": ("import os; os._exit(3)", 3),
}


@pytest.mark.parametrize("script, code", ENDS.values(), ids=ENDS)
def test_a_rank_that_fails_is_reported_with_its_exit_code(script: str, code: int, launch: Any) -> None:
    job = launch(script, "--nproc-per-node", 1)
    assert job.wait() == 1
    assert re.search(rf"exitcode\s*:\s*{code}\b", job.text), job.text
    assert "ChildFailedError" in job.text and "train.py FAILED" in job.text
    if "ValueError" in script:
        mine = job.text.partition("Traceback")[2].partition("ValueError")[0]
        assert 'train.py", line 3, in <module>' in mine and "line 2, in f" in mine and mine.count("File ") == 2
    assert job.left() == []


def test_the_error_file_of_record_is_read(launch: Any) -> None:
    script = """
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            raise RuntimeError("said in the error file")

        main()
    """
    job = launch(script, "--nproc-per-node", 1)
    assert job.wait() == 1
    report = job.text.partition("Root Cause")[2]
    assert "RuntimeError: said in the error file" in report
    assert "exited with 1" in job.text and "attempt 0: RuntimeError: said in the error file" in job.text


def test_a_module_runs_as_with_python_m(launch: Any, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "job.py").write_text(
        "from . import other\nimport sys\nprint('seen', __name__, __package__, __spec__.name, sys.argv[1:], sys.path[0])"
    )
    (tmp_path / "package" / "other.py").write_text("")
    job = launch("", "-m", "package.job", arguments=["a", "b"])
    assert job.wait() == 0, job.text
    assert f"seen __main__ package package.job ['a', 'b'] {tmp_path}" in job.text
    assert "fresh interpreter" not in job.text


def test_logs_go_where_torchruns_flags_say(launch: Any, tmp_path: Path) -> None:
    script = "import sys; print('to one'); print('to two', file=sys.stderr)"
    job = launch(script, "--nproc-per-node", 2, "--log-dir", tmp_path / "logs", "-r", "3")
    assert job.wait() == 0
    for name, text in (("stdout", "to one\n"), ("stderr", "to two\n")):
        assert [path.read_text() for path in sorted((tmp_path / "logs").rglob(f"{name}.log"))] == [text, text]
    assert "to one" not in job.text


def test_the_last_lines_of_the_rank_that_failed_are_shown_and_not_those_of_its_peers(
    launch: Any, tmp_path: Path
) -> None:
    script = """
        import os, signal, sys, time
        print("said by rank", os.environ["RANK"], file=sys.stderr)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    """
    job = launch(script, "--nproc-per-node", 2, "--log-dir", tmp_path / "logs", "-r", "3")
    assert job.wait() == 1
    said = job.text[job.text.index("rank 1 (process") :]
    assert re.search(r"was ended by SIGKILL \(out of memory\?\) \d+\.\d s after the start of attempt 0", said)
    assert "  said by rank 1\n" in said and "no restarts left" in said and "said by rank 0" not in said


def test_an_attempt_has_lasted_until_a_rank_failed_and_not_until_its_peers_had_ended(launch: Any) -> None:
    script = """
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(3)
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(5), sys.exit(0)))
        time.sleep(100)
    """
    job = launch(script, "--nproc-per-node", 2, "--max-restarts", 1, "--crash-loop", 4)
    assert job.wait() == EXIT_GAVE_UP, job.text
    lasted = [float(one) for one in re.findall(r"exited with 3 (\S+) s after the start of attempt", job.text)]
    assert len(lasted) == 2 and max(lasted) < 4, job.text


def test_a_crash_loop_waits_longer_each_time_and_is_given_up(launch: Any) -> None:
    job = launch("import sys; sys.exit(3)", "--max-restarts", 3)
    began = time.monotonic()
    assert job.wait() == EXIT_GAVE_UP
    assert time.monotonic() - began >= 1 + 2
    waits = re.findall(r"the next one starts in (\d+) s", job.text)
    assert waits == ["1", "2"] and job.text.count("exited with 3") == 4


# -- what cannot be forked ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, why",
    [(["--no-standby"], ""), (["--no-python"], "is not this interpreter"), (["--preload", "no_such"], "no_such")],
    ids=["when asked to", "a program", "a module that is not there"],
)
def test_other_ranks_are_fresh_interpreters_and_it_is_said_why(
    flags: list[str], why: str, launch: Any, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"#!{sys.executable}\nprint('it ran')")
    program.chmod(0o755)
    job = launch("", *flags, arguments=[program])
    assert job.wait() == 0, job.text
    assert "it ran" in job.text
    assert ("fresh interpreters" in job.text) == bool(why) and why in job.text


def test_a_file_beside_the_script_with_the_name_of_a_module_is_the_one_that_is_imported(
    launch: Any, tmp_path: Path
) -> None:
    (tmp_path / "colorsys.py").write_text("mine = 'the file beside the script'")
    job = launch("import colorsys; print(colorsys.mine)", "--preload", "colorsys")
    assert job.wait() == 0, job.text
    assert "the file beside the script" in job.text
    assert "fresh interpreters" in job.text and ".py beside the script" in job.text


@pytest.mark.parametrize(("name", "forks"), [("mine", False), ("jemalloc_bg_thd", True)])
def test_a_preloaded_module_that_starts_a_thread_is_not_forked_unless_the_thread_is_prepared(
    launch: Any, tmp_path: Path, name: str, forks: bool
) -> None:
    (tmp_path / "threaded.py").write_text(f"""
import threading
named = threading.Event()
def run():
    with open(f"/proc/self/task/{{threading.get_native_id()}}/comm", "w") as file:
        file.write({name!r})
    named.set()
    threading.Event().wait()
threading.Thread(target=run, daemon=True).start()
named.wait()
""")
    job = launch("print('it ran')", "--preload", "threaded", env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    assert job.wait() == 0, job.text
    assert "it ran" in job.text and ("has started 1 threads" in job.text) != forks


# -- deaths ------------------------------------------------------------------------------------------------------------

#: Ranks write their process id for each attempt, and wait until the test lets them go.
WAITING = """
    import os, sys, time
    folder, rank, attempt = sys.argv[1], os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    path = os.path.join(folder, f"rank-{rank}-{attempt}")
    with open(path + "~", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + "~", path)
    deadline = time.monotonic() + 60
    while not os.path.exists(os.path.join(folder, "go")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    print(f"rank {rank} of attempt {attempt} ends")  # one write, also with PYTHONUNBUFFERED
"""


@pytest.mark.parametrize("again", ["a fork", "a fresh interpreter"])
def test_a_killed_rank_is_replaced_with_all_others(again: str, launch: Any, tmp_path: Path) -> None:
    flags = ["--no-standby"] if again == "a fresh interpreter" else []
    job = launch(WAITING, "--nproc-per-node", 2, "--max-restarts", 3, *flags, arguments=[tmp_path])
    before = set()
    for attempt in range(3):
        pids = [int(wait_for(tmp_path / f"rank-{rank}-{attempt}")) for rank in (0, 1)]
        assert not before & set(pids)
        before |= set(pids)
        job.descendants()
        if attempt < 2:
            os.kill(pids[attempt], signal.SIGKILL)
    (tmp_path / "go").touch()
    assert job.wait() == 0, job.text
    assert [f"rank {rank} of attempt 2 ends" in job.text for rank in (0, 1)] == [True, True]
    assert job.left() == []


@pytest.mark.parametrize("told", [True, False])
def test_an_attempt_has_a_store_of_its_own(told: bool, launch: Any) -> None:
    """With the store of the attempt before, gloo connects to processes that are gone."""
    script = """
        import os, sys
        from torch.distributed import TCPStore
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False)
        assert not store.check(["from-yesterday"]), "a key of the attempt before"
        store.set("from-yesterday", "1")
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "2", "again"
    """
    # The variable by which torchrun is told to do so makes no difference.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if told else {}
    job = launch(script, "--nproc-per-node", 1, "--max-restarts", 2, "--crash-loop", 0, env=env)
    assert job.wait() == 0, job.text
    assert len(re.findall("^AssertionError: again", job.text, re.MULTILINE)) == 2


def test_launchers_of_two_hosts_restart_together(launch: Any, tmp_path: Path) -> None:
    script = """
        import os, signal, sys
        import torch
        import torch.distributed as dist
        attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        os.write(1, f"rank {rank} of {dist.get_world_size()} sums {int(total)}\\n".encode())  # one write
        if os.path.exists(sys.argv[1]):
            dist.destroy_process_group()
            sys.exit()
        dist.barrier()
        if rank == 1:
            open(sys.argv[1], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    """
    port = free_port()
    flags = ["--nnodes", 2, "--max-restarts", 3, "--rdzv-backend", "c10d", "--rdzv-id", "two"]
    flags += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    jobs = [launch(script, *flags, arguments=[tmp_path / "died"]) for _ in range(2)]
    for job in jobs:
        assert job.wait() == 0, job.text
        job.descendants()
    text = jobs[0].text + jobs[1].text
    for rank in (0, 1):
        assert text.count(f"rank {rank} of 2 sums 2\n") == 2, text
    assert sum("was ended by SIGKILL" in job.text for job in jobs) == 1
    assert "fresh interpreters" not in text
    assert [job.left() for job in jobs] == [[], []]


def test_ranks_outlive_the_process_that_forked_them_and_the_next_ones_are_forked_again(
    launch: Any, tmp_path: Path
) -> None:
    job = launch(WAITING, "--nproc-per-node", 2, "--max-restarts", 3, arguments=[tmp_path])
    pids = [int(wait_for(tmp_path / f"rank-{rank}-0")) for rank in (0, 1)]
    others = [process for process in job.descendants() if process.pid not in pids]
    for process in others:  # the zygote and its standbys, which end with it
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not wait_ended(others, timeout_s=10)
    assert all(psutil.pid_exists(pid) for pid in pids)
    os.kill(pids[0], signal.SIGKILL)
    for rank in (0, 1):
        wait_for(tmp_path / f"rank-{rank}-1")
    job.descendants()
    (tmp_path / "go").touch()
    assert job.wait() == 0, job.text
    assert "another one is started" in job.text and "fresh interpreters" not in job.text
    assert job.left() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_nothing_is_left_when_the_launcher_ends(number: signal.Signals, launch: Any, tmp_path: Path) -> None:
    job = launch(WAITING, "--nproc-per-node", 2, arguments=[tmp_path])
    for rank in (0, 1):
        wait_for(tmp_path / f"rank-{rank}-0")
    deadline = time.monotonic() + 30
    while len(job.descendants()) < 5:  # the zygote, two ranks, and two standbys that it forks when it is free
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(job.pid, number)
    assert job.wait() == (-number if number == signal.SIGKILL else 128 + number)
    assert job.left() == []


_FORKED_AS_THE_LAUNCHER_ENDS = """
import os, select, time
from resiliency.launch import standby

launcher = os.fork()
if launcher == 0:
    os._exit(0)
os.waitpid(launcher, 0)
real, forks = os.fork, []

def fork():
    forks.append(os.getpid())
    pid = real()
    if pid == 0 and len(forks) == 2:
        while os.getppid() == forks[1]:  # the kernel has given it another parent, which does not end
            time.sleep(0.01)
    return pid

os.fork = fork
pid = standby._fork_standby(launcher)
if pid == 0:
    os._exit(7)
try:
    stays = not select.select([os.pidfd_open(pid)], [], [], 5)[0]
except ProcessLookupError:
    stays = False
print("it stays" if stays else "it has ended")
"""


def test_a_standby_that_is_forked_as_the_launcher_ends_ends_at_once() -> None:
    """It waited for ten seconds for the end of its new parent, which is init."""
    code = [sys.executable, "-c", _FORKED_AS_THE_LAUNCHER_ENDS]
    done = subprocess.run(code, capture_output=True, text=True, timeout=60)
    assert done.stdout == "it has ended\n", done.stderr


def test_what_a_killed_rank_has_forked_ends_before_the_next_attempt(launch: Any, tmp_path: Path) -> None:
    script = """
        import os, sys, time
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            child = os.fork()
            if child == 0:
                time.sleep(60)
            with open(sys.argv[1] + "/pids", "w") as file:
                file.write(f"{os.getpid()} {child}")
            time.sleep(60)
        child = int(open(sys.argv[1] + "/pids").read().split()[1])
        print("the child is", "there" if os.path.exists(f"/proc/{child}") else "gone")
    """
    job = launch(script, "--max-restarts", 1, arguments=[tmp_path])
    rank, _ = map(int, wait_for(tmp_path / "pids").split())
    job.descendants()
    os.kill(rank, signal.SIGKILL)
    assert job.wait() == 0, job.text
    assert "the child is gone" in job.text
    assert job.left() == []


def test_output_of_a_rank_is_as_large_as_it_likes(launch: Any) -> None:
    script = """
        import sys
        for _ in range(200):
            sys.stdout.write("x" * (1 << 20) + "\\n")
    """
    job = launch(script, "--nproc-per-node", 2)
    assert job.wait() == 0
    assert job.output.stat().st_size >= 2 * 200 * ((1 << 20) + 1)


def test_a_launcher_that_waits_uses_no_processor_time(launch: Any, tmp_path: Path) -> None:
    """Also when its zygote could not be used."""
    for flags in ([], ["--preload", "no_such_module"]):
        job = launch(WAITING, "--nproc-per-node", 2, *flags, arguments=[tmp_path])
        pids = {int(wait_for(tmp_path / f"rank-{rank}-0")) for rank in (0, 1)}
        watched = [psutil.Process(job.pid), *(one for one in job.descendants() if one.pid not in pids)]
        before = [sum(one.cpu_times()[:2]) for one in watched if one.is_running()]
        time.sleep(1.5)  # long enough to tell a loop from a look every second
        spent = [sum(one.cpu_times()[:2]) for one in watched if one.is_running()]
        assert sum(spent) - sum(before) < 0.3, (flags, job.text)
        (tmp_path / "go").touch()
        assert job.wait() == 0
        for name in ("go", "rank-0-0", "rank-1-0"):
            (tmp_path / name).unlink()


def test_a_traceback_has_no_frame_of_the_launcher(launch: Any) -> None:
    job = launch("def f():\n    raise ValueError('boom')\nf()\n")
    assert job.wait() == 1
    shown = job.text[job.text.index("Traceback") : job.text.index("ValueError: boom")]
    assert re.findall(r'File "(.*?)", line (\d+)', shown) == [
        (str(job.output.parent / "train.py"), line) for line in "32"
    ]


def test_signals_that_the_launcher_ignores_or_blocks_are_so_in_a_rank(launch: Any, tmp_path: Path) -> None:
    """As with ``env --ignore-signal``; the launcher is forked, and so takes over what this process has."""
    main_script = """
        import signal, sys
        from resiliency.launch.fresh import ScriptCommand, become_fresh
        command = ScriptCommand(target="x.py", is_module=False, arguments=())
        become_fresh(command, environment={}, cwd="/", words=["x.py"], ignored=[10, 2], blocked=[12])
        assert signal.getsignal(10) == signal.getsignal(2) == signal.SIG_IGN
        assert signal.getsignal(15) == signal.SIG_DFL
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == {12}
    """
    job = launch(main_script, env={"PYTHONPATH": str(ROOT)})
    assert job.wait() == 0, job.text


@pytest.mark.parametrize("threads", ["", "2"])
def test_one_rank_is_forked_though_numpy_starts_threads_of_its_own(threads: str, tmp_path: Path) -> None:
    """Torchrun sets OMP_NUM_THREADS for more ranks than one only; without it OpenBLAS has a thread for each core."""
    code = """
        import os, sys
        import numpy
        from resiliency.launch import standby
        before = len(os.listdir("/proc/self/task"))
        assert standby._why_not_fork() == "", before
        pid = os.fork()
        if pid == 0:
            x = numpy.ones((300, 300))
            os._exit(0 if (x @ x)[0, 0] == 300 else 1)
        assert os.waitpid(pid, 0)[1] == 0
    """
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if threads:
        environment["OPENBLAS_NUM_THREADS"] = threads
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_the_end_of_a_fresh_rank_is_left_to_who_waits_for_it() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(7)"])
    processes.mark_own(process)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    processes.reap_others()
    assert process.wait(10) == 7


def test_a_fresh_rank_keeps_its_exit_code(launch: Any) -> None:
    script = "import os, sys; sys.exit(5)"
    job = launch(script, "--no-standby")
    assert job.wait() == 1
    assert "exitcode  : 5" in job.text
