"""The contenders: names, labels and the module of each. Importing this imports no contender."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ISOLATED", "LOOP", "Entry", "FLOOR_COPY", "FLOOR_WRITE", "RESTORE_BASE"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of a table.

    Attributes:
        name: what ``--only`` takes.
        label: what the table says.
        module: module below ``benchmarks`` that holds it.
        attribute: class or function in it.
        role: "floor", "peer", "bound", "ours" or "control".
        strategy: of the training loop, "ddp" or "fsdp2".
    """

    name: str
    label: str
    module: str
    attribute: str
    role: str = "peer"
    strategy: str = "ddp"


FLOOR_COPY = "floor-copy"
FLOOR_WRITE = "floor-write"
#: The contender whose restore ours is compared with.
RESTORE_BASE = "dcp-sync"

_C = "benchmarks._contenders"
ISOLATED: tuple[Entry, ...] = (
    Entry(name=FLOOR_COPY, label="floor: copy to shm", module=f"{_C}.floor", attribute="CopyFloor", role="floor"),
    Entry(
        name=FLOOR_WRITE, label="floor: copy, write, fsync", module=f"{_C}.floor", attribute="WriteFloor", role="floor"
    ),
    Entry(name="torch-save", label="torch.save", module=f"{_C}.stock", attribute="TorchSave"),
    Entry(
        name="lightning-async", label="Lightning AsyncCheckpointIO", module=f"{_C}.stock", attribute="LightningAsync"
    ),
    Entry(name=RESTORE_BASE, label="DCP sync", module=f"{_C}.dcp", attribute="DcpSync"),
    Entry(name="dcp-thread", label="DCP async thread", module=f"{_C}.dcp", attribute="DcpThread"),
    Entry(name="dcp-process", label="DCP async process, shared stager", module=f"{_C}.dcp", attribute="DcpProcess"),
    Entry(
        name="tc-sync",
        label="torch-checkpointing, sync staging",
        module=f"{_C}.torch_checkpointing",
        attribute="TorchCheckpointingSync",
    ),
    Entry(
        name="tc-async",
        label="torch-checkpointing, async staging",
        module=f"{_C}.torch_checkpointing",
        attribute="TorchCheckpointingAsync",
    ),
    Entry(
        name="torchsnapshot", label="torchsnapshot async_take", module=f"{_C}.torchsnapshot", attribute="TorchSnapshot"
    ),
    Entry(name="dlrover", label="dlrover MEMORY", module=f"{_C}.dlrover", attribute="DlroverMemory"),
    Entry(
        name="bound-digest",
        label="bound: copy and digest",
        module=f"{_C}.bounds",
        attribute="DigestBound",
        role="bound",
    ),
    Entry(
        name="bound-file",
        label="bound: copy to a fsynced file",
        module=f"{_C}.bounds",
        attribute="FileBound",
        role="bound",
    ),
    Entry(name="ours-lazy", label="resiliency, lazy", module=f"{_C}.ours", attribute="OursLazy", role="ours"),
    Entry(name="ours-eager", label="resiliency, eager", module=f"{_C}.ours", attribute="OursEager", role="ours"),
    Entry(
        name="ours-ramdisk",
        label="resiliency, ramdisk then disk",
        module=f"{_C}.ours",
        attribute="OursRamdisk",
        role="ours",
    ),
)

_L = "benchmarks._loop_contenders"
LOOP: tuple[Entry, ...] = (
    Entry(name="none", label="no saves (noise of the method)", module=_L, attribute="none", role="control"),
    Entry(name="stock", label="ModelCheckpoint (torch.save)", module=_L, attribute="stock"),
    Entry(name="lightning-async", label="ModelCheckpoint + AsyncCheckpointIO", module=_L, attribute="lightning_async"),
    Entry(name="dcp-thread", label="DCP async thread", module=_L, attribute="dcp_thread"),
    Entry(name="dcp-process", label="DCP async process, shared stager", module=_L, attribute="dcp_process"),
    Entry(
        name="tc-async", label="torch-checkpointing, async staging", module=_L, attribute="torch_checkpointing_async"
    ),
    Entry(name="ours", label="resiliency ModelCheckpoint", module=_L, attribute="ours", role="ours"),
    *(
        Entry(
            name=f"fsdp2-{name}", label=f"FSDP2: {label}", module=_L, attribute=attribute, role=role, strategy="fsdp2"
        )
        for name, label, attribute, role in (
            ("none", "no saves", "none", "control"),
            ("dcp-thread", "DCP async thread", "dcp_thread", "peer"),
            ("dcp-process", "DCP async process, shared stager", "dcp_process", "peer"),
            ("ours-lazy", "resiliency ModelCheckpoint, lazy", "ours", "ours"),
            ("ours-eager", "the same, eager", "ours_eager", "ours"),
        )
    ),
)
