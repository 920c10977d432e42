"""What a start would refuse to load is told at the save."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.checkpoint import Stage
from resiliency.state import load_proof
from resiliency.state.load_proof import LoadProof
from resiliency.state.structure import dump
from resiliency.testing.checkpoints import make_checkpointer, make_state

SOON = timedelta(seconds=20)


class Own:
    """A class of the user."""

    def __init__(self) -> None:
        self.value = 1


@pytest.fixture
def allowed_own() -> Iterator[None]:
    with torch.serialization.safe_globals([Own]):
        yield


def refusal(proof: LoadProof, tree: Any) -> str:
    return proof.refusal(dump(tree).data_pickle())


STATES = {
    "plain": make_state(1),
    "large": {"w": torch.zeros(1).expand(1 << 12, 1 << 12), "b": torch.zeros(0)},
    "odd": {
        "c": torch.ones(2, 3, dtype=torch.complex64),
        "l": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "s": torch.eye(3).to_sparse(),
        "d": torch.float16,
        "t": torch.Size([1, 2]),
    },
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
def test_of_what_can_be_loaded_nothing_is_said(state: Any) -> None:
    assert refusal(LoadProof(), state) == ""


def test_a_class_of_the_user_is_named_once() -> None:
    proof = LoadProof()
    assert refusal(proof, {"x": [1]}) == ""
    assert "test_load_proof.Own" in refusal(proof, {"x": [Own()]})
    assert refusal(proof, {"x": [Own()]}) == ""


@pytest.mark.parametrize(
    ("state", "loaded"),
    [
        ({**make_state(1), "seen": list(range(10_000))}, False),  # names nothing that could be refused
        ({"x": Own(), "seen": list(range(10_000))}, True),
        ({"x": Own(), "seen": list(range(1_000_000))}, False),  # too large
    ],
    ids=["plain", "class", "large"],
)
def test_the_interpreter_is_not_held_by_a_load_that_can_be_spared(
    state: Any, loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load of a million numbers takes longer than their save, and the training thread waits for the interpreter."""
    loads: list[int] = []
    monkeypatch.setattr(load_proof, "unpickle", lambda structure, storage: loads.append(len(structure)))
    assert refusal(LoadProof(), state) == ""
    assert bool(loads) is loaded


def test_an_allowed_class_is_not(allowed_own: None) -> None:
    assert refusal(LoadProof(), {"x": Own()}) == ""


@pytest.mark.parametrize("where", ["state", "per_rank", "nowhere"])
def test_a_save_says_what_a_start_would_refuse(tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str) -> None:
    state: dict[str, Any] = make_state(1)
    per_rank: dict[str, Any] = {}
    {"state": state, "per_rank": per_rank, "nowhere": {}}[where]["object"] = Own()
    with make_checkpointer(tmp_path) as checkpointer, caplog.at_level(logging.WARNING):
        for step in range(1, 5):
            ticket = checkpointer.save(step, state, per_rank=per_rank)
            assert ticket is not None
            ticket.wait(Stage.DURABLE, timeout=SOON)
    said = [record.message for record in caplog.records if "will refuse to load it" in record.message]
    assert len(said) == (where != "nowhere")
    for message in said:
        assert "step 1 " in message and "test_load_proof.Own" in message and "add_safe_globals" in message
    caplog.clear()


def test_a_proof_leaves_no_sparse_tensor_to_the_next_load() -> None:
    """Torch validates those that were made when it has loaded something, and here they have no values."""
    assert refusal(LoadProof(), STATES["odd"]) == ""
    assert torch._utils._sparse_tensors_to_validate == []  # type: ignore[attr-defined]
