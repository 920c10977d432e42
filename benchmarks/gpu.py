"""Shows what the engine does on one GPU, in one table: ``python -m benchmarks.gpu`` (or ``make gpu``).

For a machine with one GPU and no network: it needs torch, Lightning and this library's base dependencies, and takes
some three minutes. ``--device cpu`` runs the same parts without a GPU, which shows that the script works and nothing
about GPUs. A part that fails is a row with its reason; the others go on. The exit code is 1 when one failed or missed
its limit.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.storage.stage import Stage

__all__ = ["PARTS", "Bench", "Row", "main", "measure"]

_MIB = 1 << 20
_REPEATS = 5
_TESTS_S = 150.0
_WAIT = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        value: as printed, with its unit.
        limit: what it should be; "" for a figure without one.
        good: whether it is; None without a limit.
    """

    part: str
    what: str
    value: str
    limit: str = ""
    good: bool | None = None


@dataclass(frozen=True)
class Bench:
    """What every part needs.

    Attributes:
        device: of all tensors.
        nbytes: size of the state in the copy parts.
        folder: for checkpoints; removed at the end.
    """

    device: torch.device
    nbytes: int
    folder: Path

    def state(self, *, tensors: int = 32) -> dict[str, Tensor]:
        """Random float32 tensors on the device, ``nbytes`` in all."""
        draw = torch.Generator(device=self.device).manual_seed(4)
        count = self.nbytes // 4 // tensors
        return {f"w{i}": torch.rand(count, device=self.device, generator=draw) for i in range(tensors)}

    def wait(self) -> None:
        """Blocks until the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Of ``work`` and all that it starts on the device."""
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    @contextmanager
    def checkpointer(self, name: str) -> Iterator[Checkpointer]:
        """One rank's engine; its agent is a process of its own, as in a job."""
        with Checkpointer(self.folder / name, rank=0, world_size=1, options=CheckpointerOptions()) as engine:
            yield engine


def _link(bench: Bench) -> float:
    """Bytes a second from the device into page-locked memory that was used before: what no save can exceed."""
    source = torch.rand(bench.nbytes // 4, device=bench.device)
    target = torch.empty(source.shape, pin_memory=bench.device.type == "cuda")
    bench.seconds(lambda: target.copy_(source))
    return bench.nbytes / median(
        bench.seconds(lambda: target.copy_(source, non_blocking=True)) for _ in range(_REPEATS)
    )


def copies(bench: Bench) -> Iterator[Row]:
    """Saves with nothing beside them: how much of the link the copy uses, and what the caller waits for."""
    link = _link(bench)
    yield Row(part="copy", what="link: device to page-locked memory", value=f"{link / 1e9:.1f} GB/s")
    state = bench.state()
    calls, fences, off_device, committed = [], [], [], []
    with bench.checkpointer("copy") as engine:
        engine.warm_up(state)
        for step in range(1, _REPEATS + 3):
            bench.wait()
            began = time.perf_counter()
            ticket = engine.save(step, state, lazy=True)
            called = time.perf_counter()
            engine.fence()
            fenced = time.perf_counter()
            bench.wait()  # the compute stream waits for the copies, so these have ended
            left = time.perf_counter()
            if ticket is None:
                raise RuntimeError("a save was skipped")
            ticket.wait(Stage.COMMITTED, timeout=_WAIT)
            if step > 2:  # the first two get their files and page-locked memory
                calls.append(called - began)
                fences.append(fenced - called)
                off_device.append(left - began)
                committed.append(time.perf_counter() - began)
            engine.flush()
    share = bench.nbytes / median(off_device) / link
    cuda = bench.device.type == "cuda"
    yield Row(part="copy", what="save call, 32 tensors", value=f"{median(calls) * 1e3:.2f} ms")
    yield Row(
        part="copy",
        what="fence: the CPU waits",
        value=f"{median(fences) * 1e3:.2f} ms",
        limit="<= 5 ms" if cuda else "",
        good=median(fences) <= 5e-3 if cuda else None,
    )
    yield Row(
        part="copy",
        what="share of the link, call to state free",
        value=f"{share:.2f}",
        limit=">= 0.8" if cuda else "",
        good=share >= 0.8 if cuda else None,
    )
    yield Row(part="copy", what="committed after", value=f"{median(committed):.3f} s")


def compute(bench: Bench) -> Iterator[Row]:
    """A training loop with and without saves: what a step loses."""
    size = 4096 if bench.device.type == "cuda" else 512
    layers = nn.Sequential(*[nn.Linear(size, size, device=bench.device) for _ in range(4)])
    optimizer = torch.optim.AdamW(layers.parameters())
    data = torch.rand(size, size, device=bench.device)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(4):
            layers(data).square().mean().backward()
        optimizer.step()

    step()
    every, rounds = 10, 4
    with bench.checkpointer("compute") as engine:
        state = {"model": layers.state_dict(), "optimizer": optimizer.state_dict()}
        engine.warm_up(state)
        plain: list[float] = []
        saving: list[float] = []
        nbytes = 0
        for number in range(1 + 2 * rounds):
            saves = number % 2 == 0
            times = []
            for at in range(every):
                if saves and at == 0:
                    bench.wait()
                    began = time.perf_counter()
                    ticket = engine.save(
                        number + 1, {"model": layers.state_dict(), "optimizer": optimizer.state_dict()}
                    )
                    nbytes = ticket.nbytes if ticket is not None else 0
                    step()
                    bench.wait()
                    times.append(time.perf_counter() - began)
                else:
                    times.append(bench.seconds(step))
            if number:
                (saving if saves else plain).append(sum(times))
            engine.flush()
    lost = median(saving) - median(plain)
    a_step = median(plain) / every
    yield Row(
        part="compute", what=f"step without saves ({nbytes / _MIB:.0f} MiB of state)", value=f"{a_step * 1e3:.1f} ms"
    )
    yield Row(part="compute", what="lost per save", value=f"{lost * 1e3:.1f} ms = {lost / a_step:.2f} steps")


def restore(bench: Bench) -> Iterator[Row]:
    """A save is changed on the device right after its fence; what is restored must be the values of the call."""
    state = bench.state()
    kept = {key: value.clone() for key, value in state.items()}
    with bench.checkpointer("restore") as engine:
        ticket = engine.save(1, state, lazy=True)
        engine.fence()
        for tensor in state.values():
            tensor.fill_(-1.0)  # on the compute stream, which waits for the copies
        if ticket is None:
            raise RuntimeError("the save was skipped")
        ticket.wait(Stage.COMMITTED, timeout=_WAIT)
        took = bench.seconds(lambda: engine.load(into=state))
    equal = all(torch.equal(state[key], value) for key, value in kept.items())
    yield Row(part="restore", what="every bit is that of the call", value=str(equal), limit="True", good=equal)
    yield Row(part="restore", what="into live tensors, verified", value=f"{bench.nbytes / took / 1e9:.2f} GB/s")


def sharded(bench: Bench) -> Iterator[Row]:
    """FSDP2 with one rank: train, save, train on, load, compare."""
    from torch import distributed
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    cuda = bench.device.type == "cuda"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend = "nccl" if cuda else "gloo"
    distributed.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        torch.manual_seed(4)
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to(bench.device)
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh(bench.device.type, (1,)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        data = torch.rand(64, 512, device=bench.device)

        def step() -> None:
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()

        def local() -> list[Tensor]:
            tensors = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
            return [getattr(tensor, "_local_tensor", tensor).detach() for tensor in tensors]

        step()
        kept = [tensor.clone() for tensor in local()]
        with bench.checkpointer("sharded") as engine:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            ticket = engine.save(1, state, lazy=True)
            step()  # fences by itself
            if ticket is None:
                raise RuntimeError("the save was skipped")
            ticket.wait(Stage.COMMITTED, timeout=_WAIT)
            engine.load(into=state)
        bench.wait()
        equal = all(torch.equal(now, before) for now, before in zip(local(), kept, strict=True))
        yield Row(
            part="FSDP2",
            what=f"{backend}, fused AdamW: restored bits equal",
            value=str(equal),
            limit="True",
            good=equal,
        )
    finally:
        distributed.destroy_process_group()


def fit(bench: Bench) -> Iterator[Row]:
    """Lightning: a fit that is resumed in its middle ends with the weights of one that was not interrupted."""
    from resiliency.callbacks.model_checkpoint import build
    from resiliency.plugins.namespaces import default_namespace

    namespace = default_namespace()
    lightning: Any = importlib.import_module(namespace)

    class Net(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(256, 256), nn.Dropout(0.1), nn.Linear(256, 1))

        def training_step(self, batch: Any, at: int) -> Tensor:
            loss: Tensor = self.layers(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def run(folder: str, steps: int) -> dict[str, Tensor]:
        lightning.seed_everything(4, verbose=False)
        data = torch.utils.data.TensorDataset(torch.rand(320, 256))
        net = Net()
        trainer = lightning.Trainer(
            accelerator="gpu" if bench.device.type == "cuda" else "cpu",
            devices=1,
            max_steps=steps,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[
                build(namespace)(bench.folder / folder, every_n_train_steps=10, save_last=True, auto_resume=True)
            ],
        )
        trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=16, shuffle=True))
        return {key: value.cpu() for key, value in net.state_dict().items()}

    whole = run("whole", 30)
    run("in-two", 20)
    resumed = run("in-two", 30)
    equal = all(torch.equal(value, whole[key]) for key, value in resumed.items())
    yield Row(
        part="Lightning", what=f"{namespace}: resumed equals undisturbed", value=str(equal), limit="True", good=equal
    )


def tests(bench: Bench) -> Iterator[Row]:
    """Every test that needs CUDA."""
    if bench.device.type != "cuda":
        yield Row(part="tests", what="pytest -m gpu", value="not run without CUDA")
        return
    root = Path(__file__).resolve().parents[1]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "tests/checkpoint",
        "tests/plugins",
    ]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=_TESTS_S, check=False)
    last = (ran.stdout.strip().splitlines() or [ran.stderr.strip()[-200:]])[-1]
    yield Row(part="tests", what="pytest -m gpu", value=last, limit="all pass", good=ran.returncode == 0)
    if ran.returncode:
        print(ran.stdout[-6000:], ran.stderr[-2000:], file=sys.stderr)


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "copy": copies,
    "compute": compute,
    "restore": restore,
    "FSDP2": sharded,
    "Lightning": fit,
    "tests": tests,
}


def measure(device: str, nbytes: int, folder: Path) -> Iterator[Row]:
    """The rows, each as soon as it is known. A part that fails is a row that is not good.

    Args:
        device: as torch names it.
        nbytes: of the state in the parts that copy.
        folder: where checkpoints are put.
    """
    bench = Bench(torch.device(device), nbytes, folder)
    for name, part in PARTS.items():
        try:
            yield from part(bench)
        except Exception as failure:  # Boundary: the other parts are worth the machine's time.
            traceback.print_exc()
            reason = str(failure).splitlines() or [""]
            yield Row(
                part=name, what="failed", value=f"{type(failure).__name__}: {reason[0]}", limit="no error", good=False
            )


def _table(rows: Sequence[Row], device: str) -> Table:
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    table = Table(title=f"{name}, torch {torch.__version__}", title_justify="left")
    for head in ("part", "what", "value", "limit", "good"):
        table.add_column(head)
    for row in rows:
        good = {True: "[green]yes", False: "[red]no", None: ""}[row.good]
        table.add_row(row.part, row.what, row.value, row.limit, good)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table. Returns 0, or 1 when a part failed or missed its limit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--mib", type=int, default=4096, help="size of the state that is copied, in MiB")
    parser.add_argument(
        "--dir", type=Path, help="folder for checkpoints; the default is the system's for temporary files"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    chosen = parser.parse_args(arguments)
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --device cpu runs the same parts without one")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = []
    with tempfile.TemporaryDirectory(dir=chosen.dir) as folder:
        for row in measure(chosen.device, chosen.mib * _MIB, Path(folder)):
            print(f"{row.part}: {row.what}: {row.value}", file=sys.stderr, flush=True)
            rows.append(row)
    Console(width=None if sys.stdout.isatty() else 120).print(_table(rows, chosen.device))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return int(any(row.good is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
