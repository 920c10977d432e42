"""A late copy and an optimizer's step that nobody has fenced: what is committed is the state of before the step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, Stage
from resiliency.testing.zygote import Zygote
from tests.zygote import start_script

SOON = timedelta(seconds=20)
KINDS: dict[str, dict[str, bool]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "single": {"foreach": False},
}


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    options = CheckpointerOptions(agent="embedded", lazy_bytes=1)
    with Checkpointer(tmp_path, run="r", rank=0, world_size=1, options=options) as made:
        yield made


def model_and_optimizer(**kind: bool) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(512, 2048)
    optimizer = torch.optim.AdamW(model.parameters(), **kind)
    model(torch.randn(2, 512)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def copy_of(state: dict[str, Any]) -> list[Tensor]:
    moments = [value for of_one in state["optimizer"]["state"].values() for value in of_one.values()]
    return [tensor.detach().clone() for tensor in (*state["model"].values(), *moments)]


def saved_and_stepped(
    checkpointer: Checkpointer, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, go: Callable[[], object]
) -> bool:
    """True when the save holds the state of before ``go``."""
    state = state_of(model, optimizer)
    before = copy_of(state)
    ticket = checkpointer.save(step, state, lazy=True)
    assert ticket is not None
    go()
    ticket.wait(Stage.COMMITTED, timeout=SOON)
    restored = checkpointer.load()
    assert restored is not None and restored.step == step
    return all(torch.equal(a, b) for a, b in zip(before, copy_of(restored.state), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_for_the_copy(checkpointer: Checkpointer, kind: str) -> None:
    model, optimizer = model_and_optimizer(**KINDS[kind])
    # More than three, because the first, second and fourth late copy are compared with the tensors.
    exact = [saved_and_stepped(checkpointer, step, model, optimizer, optimizer.step) for step in range(1, 8)]
    assert exact == [True] * 7 and checkpointer.torn == 0


def test_a_step_with_a_closure_waits_before_the_closure_runs(checkpointer: Checkpointer) -> None:
    model, _ = model_and_optimizer()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    state = {"model": model.state_dict()}
    before = model.weight.detach().clone()

    def closure() -> Tensor:
        assert not checkpointer.pending
        optimizer.zero_grad()
        loss = model(torch.ones(2, 512)).pow(2).mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    ticket = checkpointer.save(1, state, lazy=True)
    assert ticket is not None and checkpointer.pending
    optimizer.step(closure)  # type: ignore[no-untyped-call]
    ticket.wait(Stage.COMMITTED, timeout=SOON)
    restored = checkpointer.load()
    assert restored is not None and torch.equal(restored.state["model"]["weight"], before)
    assert not torch.equal(model.weight, before)


def test_a_trainer_that_fences_within_the_closure_decides_for_itself(checkpointer: Checkpointer) -> None:
    model, optimizer = model_and_optimizer(fused=True)
    asked: list[tuple[object, bool]] = []
    checkpointer.before_step = lambda stepped, with_closure: asked.append((stepped, with_closure))

    def closure() -> Tensor:
        assert checkpointer.pending
        checkpointer.fence()
        return torch.zeros(())

    assert saved_and_stepped(checkpointer, 1, model, optimizer, lambda: optimizer.step(closure))
    optimizer.step()  # nothing is pending
    assert asked == [(optimizer, True)]


@pytest.mark.parametrize("mine", [True, False])
def test_a_step_on_another_thread_waits_if_it_changes_what_is_copied(checkpointer: Checkpointer, mine: bool) -> None:
    """As hooks of backward do on a GPU. Another model's optimizer does not decide about this copy."""
    model, optimizer = model_and_optimizer(fused=True)
    _, another = model_and_optimizer(fused=True)

    def step() -> None:
        thread = threading.Thread(target=(optimizer if mine else another).step)
        thread.start()
        thread.join(30)
        snapshot = checkpointer._opened.saves.in_flight.snapshot  # type: ignore[union-attr]
        assert snapshot is not None
        if mine:
            assert snapshot.decided
        checkpointer.fence()

    assert saved_and_stepped(checkpointer, 1, model, optimizer, step)


def test_after_close_steps_are_left_alone(tmp_path: Path) -> None:
    from torch.optim import optimizer as hooks

    before = len(hooks._global_optimizer_pre_hooks)
    model, optimizer = model_and_optimizer()
    with Checkpointer(tmp_path, run="r", rank=0, world_size=1, options=CheckpointerOptions(agent="embedded")) as one:
        one.save(1, state_of(model, optimizer), lazy=True)
        assert len(hooks._global_optimizer_pre_hooks) == before + 1
    assert len(hooks._global_optimizer_pre_hooks) == before
    optimizer.step()


SHARDED = """
import sys
from datetime import timedelta
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from resiliency.checkpoint import Checkpointer, CheckpointerOptions, Stage
from resiliency.errors import ResiliencyError

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
checkpointer = Checkpointer(
    sys.argv[1], run="r", rank=0, world_size=1, options=CheckpointerOptions(agent="embedded", lazy_bytes=1)
)
step = 0


def save(model, change):
    global step
    step += 1
    before = model.weight.full_tensor().clone()
    ticket = checkpointer.save(step, {"model": model.state_dict()}, lazy=True)
    change()
    checkpointer.fence()
    try:
        ticket.wait(Stage.COMMITTED, timeout=timedelta(seconds=20))
    except ResiliencyError as error:
        assert "changed before the fence" in str(error), error
        return "torn"
    return "exact" if torch.equal(checkpointer.load().state["model"]["weight"], before) else "wrong"


for kind in ({"foreach": True}, {"fused": True}, {"foreach": False}):
    model = nn.Linear(512, 2048)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **kind)
    model(torch.randn(2, 512)).sum().backward()
    found = [save(model, optimizer.step) for _ in range(7)]
    print(kind, found)
    assert found == ["exact"] * 7, found


def clip():
    with torch.no_grad():
        model.weight.mul_(0.5)


found = {save(model, clip) for _ in range(7)}
print("clipped", found)
assert "wrong" not in found, found
checkpointer.close()
torch.distributed.destroy_process_group()
"""


def test_a_step_of_sharded_parameters_waits_for_the_copy(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, zygote: Zygote
) -> None:
    """Torch counts no change of the local tensors of DTensors. A change by hand is counted in the DTensor alone."""
    output = tmp_path_factory.mktemp("output") / "sharded"
    child = start_script(zygote, SHARDED, output, str(tmp_path))
    assert child.wait(timeout_s=120) == 0, output.read_text()[-3000:]
