"""Words that torchrun takes do the same here: what torch's own tests of its command line ask for."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from resiliency.launch import run
from tests.ports import free_port
from tests.rings import few

TRAIN = """
    import os, sys
    import torch
    import torch.distributed as dist
    init_method = sys.argv[1] if len(sys.argv) > 1 else "env://"
    place = {} if init_method == "env://" else {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", init_method=init_method, **place)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert dist.is_torchelastic_launched()
    sys.stdout.write(f"rank {dist.get_rank()} of {int(total)}\\n")
    dist.destroy_process_group()
"""
SHELL = "#!/bin/sh\necho rank $RANK of $WORLD_SIZE\n"


def ranks_in(text: str) -> set[str]:
    return {line[-11:] for line in text.splitlines() if "rank " in line and " of " in line}


TWO = {"rank 0 of 2", "rank 1 of 2"}


@pytest.mark.parametrize("init_method", few(["env://", "tcp://localhost:PORT"], ["tcp://localhost:PORT"]))
@pytest.mark.parametrize("flags", few([[], ["--run-path"]], [[]]), ids=["in a process", "run-path"])
def test_ranks_meet_at_the_port_that_was_asked_for(flags: list[str], init_method: str, launch: Any) -> None:
    port = free_port()
    where = ["--nproc-per-node", 2, "--master-addr", "localhost", "--master-port", port]
    job = launch(TRAIN, *flags, *where, arguments=[init_method.replace("PORT", str(port))])
    assert job.wait() == 0, job.text
    assert ranks_in(job.text) == TWO


@pytest.mark.parametrize("nproc", ["2", "auto", "cpu"])
def test_another_program_is_run_as_often_as_its_variables_say(nproc: str, launch: Any, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(SHELL)
    (tmp_path / "train.sh").chmod(0o755)
    job = launch("", "./train.sh", env={"PET_NPROC_PER_NODE": nproc, "PET_NO_PYTHON": "1"})
    assert job.wait() == 0, job.text
    count = 2 if nproc == "2" else len(os.sched_getaffinity(0))
    assert ranks_in(job.text) == {f"rank {rank} of {count}" for rank in range(count)}


def test_one_host_of_two_that_may_be_is_enough(launch: Any) -> None:
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "job"]
    job = launch(TRAIN, "--nnodes", "1:2", "--nproc-per-node", 2, *where, "--rdzv-conf", "last_call_timeout=1")
    assert job.wait() == 0, job.text
    assert ranks_in(job.text) == TWO


def test_lines_of_ranks_are_marked_and_filtered_as_asked(launch: Any, tmp_path: Path) -> None:
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]: "}
    logs = ["--redirects", "3", "--tee", "3", "--log-dir", tmp_path / "logs"]
    job = launch(TRAIN, "--nproc-per-node", 2, *logs, "--local-ranks-filter", "1", env=env)
    assert job.wait() == 0, job.text
    assert "[rank1]: rank 1 of 2" in job.text
    assert "[rank0]: " not in job.text


def test_words_behind_the_script_are_its_own(launch: Any) -> None:
    script = "import sys; print('words', sys.argv[1:])"
    words = ["--h", "512", "--r", "--m=3", "-m", "--nproc-per-node", "7"]
    job = launch(script, "--nproc-per-node=1", "--max-restart", 2, "-t3", "-r", "0", "--no-standby", arguments=words)
    assert job.wait() == 0, job.text
    assert f"words {words}" in job.text


WORDS = """--nproc-per-node --nproc-per-node=3 --nproc_per_node=1 -m --module -r -t3 --max-restart --max-restarts=1 --standalone
--no-python --lr=3 --h --r -x -h 2 5 x.py y.py - --""".split()

PARSER, OURS = get_args_parser(), get_args_parser()  # made once: it takes longer than all that they parse
run._add_own_flags(OURS)


@given(st.lists(st.sampled_from(WORDS), max_size=7))
@settings(max_examples=600, deadline=None)
def test_whatever_torchrun_understands_is_understood_in_the_same_way(words: list[str]) -> None:
    def understood(parse: Callable[[], Any]) -> dict[str, Any] | str:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                return vars(parse())
        except SystemExit:
            return said.getvalue()

    theirs, ours = understood(lambda: PARSER.parse_args(words)), understood(lambda: run._parse(OURS, words))
    if isinstance(theirs, dict):
        assert isinstance(ours, dict) and theirs.items() <= ours.items()
    else:
        assert isinstance(ours, str) or "ambiguous option" in theirs


MISTAKES = {
    "a module of another program": (["--no-python", "--module"], "no_python"),
    "a number of ranks that is none": (["--nproc-per-node", "many"], "many"),
    "a kind of logs that nobody has": (["--logs-specs", "of-nobody"], "of-nobody"),
    "hosts that are no number": (["--nnodes", "1:2:3"], "1:2:3"),
}


@pytest.mark.parametrize("flags, said", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_refused(flags: list[str], said: str, launch: Any) -> None:
    job = launch(TRAIN, *flags)
    assert job.wait() == 1
    assert said in job.text.replace("--no-python", "no_python"), job.text
    assert not ranks_in(job.text)
