"""Hosts that have one name are still several, when they have neither their agents nor their folders in common."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from resiliency.checkpoint import Stage
from resiliency.checkpoint._hosts import host_names, place_of
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.errors import ResiliencyError
from resiliency.storage.catalog import scan
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import RUN, differences, make_checkpointer, make_state, run_ranks

SOON = timedelta(seconds=20)


@pytest.mark.parametrize(
    ("named", "names"),
    [
        (["a:1", "a:1", "b:2"], ["a", "a", "b"]),
        (["a:1", "a:2", "a:1", "a:3"], ["a", "a.2", "a", "a.3"]),
        (["a:1", "a.2:2", "a:3"], ["a", "a.2", "a.3"]),
        (["a:1", "a:3", "a.2:2"], ["a", "a.3", "a.2"]),
        (["a:1", "b:1"], ["a", "b"]),  # hosts with one shared folder
    ],
)
def test_each_place_has_a_name_of_its_own(named: list[str], names: list[str]) -> None:
    pairs = [(name, place) for name, place in (one.split(":") for one in named)]
    assert list(host_names(pairs)) == names


def test_a_place_is_a_folder_whatever_its_path(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("a")
    a, b, link = (place_of(str(tmp_path / name)) for name in ("a", "b", "link"))
    assert a == link != b


def test_another_network_namespace_is_another_place(tmp_path: Path) -> None:
    code = f"from resiliency.checkpoint._hosts import place_of; print(place_of({str(tmp_path)!r}))"
    found = []
    for before in ([], ["unshare", "--user", "--map-root-user", "--net"]):
        result = subprocess.run([*before, sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        if before and result.returncode and "unshare" in result.stderr:
            pytest.skip(f"no network namespaces here: {result.stderr.strip()}")
        found.append(result.stdout.strip())
    assert found[0] == place_of(str(tmp_path)) != found[1]
    assert os.path.basename(found[1])


def test_two_pods_that_have_the_name_of_their_machine_commit_and_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each waited for a record that never came, and no checkpoint was ever committed."""

    def work(rank: int, coordinator: Coordinator) -> int | None:
        with make_checkpointer(tmp_path / f"pod-{rank}", coordinator) as checkpointer:
            restored = checkpointer.load()
            step = 0 if restored is None else restored.step
            if restored is not None:
                assert differences(restored.state, make_state(step)) == []
            ticket = checkpointer.save(step + 1, make_state(step + 1), names=[f"{step + 1}.ckpt"])
            assert ticket is not None
            ticket.wait(Stage.COMMITTED, timeout=SOON)
            return step

    with caplog.at_level(logging.WARNING):
        assert run_ranks(2, work) == [0, 0]
    assert any("Give each host its own RESILIENCY_NODE" in record.message for record in caplog.records)
    assert run_ranks(2, work) == [1, 1]
    for rank in range(2):
        assert (tmp_path / f"pod-{rank}" / "2.ckpt").is_file()
        found = scan(LocalTier(tmp_path / f"pod-{rank}"), RUN)
        assert 2 in {listing.id.step for listing in found}


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_state_is_loaded_where_another_host_has_rank_0(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, world_size: int
) -> None:
    """A launcher may give the hosts other ranks at each start, or host 0 is lost. The copy of host 1 was refused, since it has
    not what rank 0 had for itself."""

    def save(rank: int, coordinator: Coordinator) -> None:
        with make_checkpointer(tmp_path / f"host-{rank}", coordinator) as checkpointer:
            ticket = checkpointer.save(1, make_state(1), per_rank={"rank": rank})
            assert ticket is not None
            ticket.wait(Stage.COMMITTED, timeout=SOON)

    def load(rank: int, coordinator: Coordinator) -> object:
        with make_checkpointer(tmp_path / f"host-{1 - rank}", coordinator) as checkpointer:
            restored = checkpointer.load()
            assert restored is not None
            assert differences(restored.state, make_state(1)) == []
            return restored.per_rank

    run_ranks(2, save)
    with caplog.at_level(logging.WARNING):
        assert run_ranks(world_size, load) == [None] * world_size
    told = [record.message for record in caplog.records if "what this rank alone had" in record.message]
    here, nowhere = "rank 0: this host's copy of step 1 lacks", "rank 1: no good copy is left of"
    assert [text.split(" what this rank")[0] for text in sorted(told)] == [here, nowhere][:world_size]


@pytest.mark.parametrize("shared", [False, True], ids=["a folder each", "one folder"])
def test_hosts_whose_states_differ_are_told_which_ranks_they_are(tmp_path: Path, shared: bool) -> None:
    """No agent sees the records of all ranks, or only the last one does."""

    def work(rank: int, coordinator: Coordinator) -> list[str]:
        said = []
        folder = tmp_path / ("shared" if shared else f"host-{rank}")
        checkpointer = make_checkpointer(folder, coordinator)
        checkpointer._environment = dataclasses.replace(checkpointer._environment, node=f"host{rank}")
        with checkpointer:
            for step in (1, 2):
                more = {"more": torch.zeros(5000)} if rank == 1 and step == 1 else {}
                ticket = checkpointer.save(step, {**make_state(step), **more})
                assert ticket is not None
                try:
                    ticket.wait(Stage.COMMITTED, timeout=SOON)
                except ResiliencyError as error:
                    said.append(str(error))
        return said

    for said in run_ranks(3, work):
        assert len(said) == 1 and "rank 1 others than ranks 0, 2" in said[0], said
