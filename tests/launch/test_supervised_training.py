"""A Lightning job below a supervisor that loses a host and a rank ends with the weights of one that lost nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.monitors import FakeMonitor, FakeSupervisor
from tests.patience import PATIENCE

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]

STEPS = 40

SCRIPT = """
    import os, sys, time, warnings
    warnings.filterwarnings("ignore")
    from pathlib import Path
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader, TensorDataset
    from resiliency import ModelCheckpoint
    from resiliency.launch import restartable

    folder, steps = Path(sys.argv[1]), int(sys.argv[2])

    class Says(Callback):
        def on_train_start(self, trainer, module):
            generation = os.environ.get("RESILIENCY_ATTEMPT", "1")
            draft = folder / f"draft-{os.getpid()}"  # who reads the other name finds all of it
            draft.write_text(f"{os.getpid()} {trainer.global_step}")
            draft.rename(folder / f"began-{generation}-{trainer.global_rank}")

        def on_train_batch_end(self, trainer, *_):
            generation = os.environ.get("RESILIENCY_ATTEMPT", "0")
            (folder / f"step-{generation}-{trainer.global_rank}-{trainer.global_step}").touch()
            while trainer.global_step == 12 * int(generation):  # somebody dies here
                time.sleep(0.01)
                if (folder / f"go-{generation}").exists():
                    break

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2))

        def training_step(self, batch, batch_idx):
            return self.layers(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    @restartable
    def main():
        seed_everything(7)
        trainer = Trainer(
            accelerator="cpu",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
            strategy=DDPStrategy(process_group_backend="gloo"),
            max_steps=steps,
            max_epochs=-1,
            callbacks=[ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=5), Says()],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = Net()
        trainer.fit(model, DataLoader(TensorDataset(torch.randn(128, 8)), batch_size=4, shuffle=True))
        if trainer.global_rank == 0:
            torch.save(model.state_dict(), folder / "weights.pt")

    main()
"""


def _read(path: Path, timeout_s: float = 90) -> str:
    deadline = time.monotonic() + PATIENCE * timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} was not written"
        time.sleep(0.01)
    return path.read_text()


def test_weights_after_a_lost_host_and_a_lost_rank_are_those_of_an_undisturbed_run(launch: Any, tmp_path: Path) -> None:
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    for folder in (disturbed, undisturbed):
        folder.mkdir()
    (undisturbed / "go-0").touch()
    reference = launch(SCRIPT, "--standalone", "--nproc-per-node", 2, arguments=[undisturbed, STEPS])
    supervisor = FakeSupervisor()
    jobs: dict[FakeMonitor, Any] = {}

    def host() -> FakeMonitor:
        monitor = supervisor.monitor()
        flags = ("--rdzv-backend", "supervised", "--rdzv-endpoint", monitor.name, "--local-addr", "127.0.0.1")
        env = {"RESILIENCY_NODE": f"host-{len(jobs)}"}
        jobs[monitor] = launch(SCRIPT, *flags, arguments=[disturbed, STEPS], env=env)
        return monitor

    try:
        hosts, spare = [host(), host()], host()
        supervisor.place(*hosts)
        for rank in range(2):
            _read(disturbed / f"step-1-{rank}-12")
        os.kill(jobs[hosts[0]].pid, signal.SIGKILL)  # the one with the store; the other one sleeps
        supervisor.place(spare, hosts[1])
        pids = []
        for rank in range(2):
            pid, step = map(int, _read(disturbed / f"began-2-{rank}").split())
            pids.append(pid)
            assert step == 10, "from the newest checkpoint, on the spare as well"
            _read(disturbed / f"step-2-{rank}-24")
        os.kill(pids[1], signal.SIGKILL)
        hosts[1].wait("lost", generation=2)
        supervisor.place(spare, hosts[1])
        assert [int(_read(disturbed / f"began-3-{rank}").split()[1]) for rank in range(2)] == [20, 20]
        (disturbed / "go-3").touch()
        for one in (spare, hosts[1]):
            one.wait("ended", generation=3)
        supervisor.complete()
        assert [jobs[one].wait() for one in (spare, hosts[1])] == [0, 0]
    finally:
        supervisor.close()
    assert reference.wait() == 0, reference.text
    found, expected = (torch.load(folder / "weights.pt") for folder in (disturbed, undisturbed))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
