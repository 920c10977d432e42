"""Tables and JSON of ``resiliency ckpt``: formats what ``inspection`` found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from resiliency.goodput.words import duration
from resiliency.inspection.contents import Entry, ShardContents, TensorRow
from resiliency.inspection.pruning import PrunePlan
from resiliency.inspection.survey import LabeledTier, StepState, StepView
from resiliency.inspection.verify import Finding
from resiliency.storage.manifest import Manifest
from resiliency.storage.step_id import StepId

if TYPE_CHECKING:  # importing it needs torch
    from resiliency.inspection.export import Exported
    from resiliency.inspection.importing import Imported

__all__ = [
    "DAMAGE_TEXT",
    "PART_TEXT",
    "exported_json",
    "finding_json",
    "imported_json",
    "inspection_json",
    "ls_json",
    "plan_json",
    "plural",
    "print_finding",
    "print_inspection",
    "print_ls",
    "print_plan",
    "size",
    "step_json",
    "utc",
]

_COLORS = {
    StepState.COMMITTED: "green",
    StepState.PART: "green",
    StepState.DAMAGED: "bold red",
    StepState.UNFINISHED: "yellow",
}


#: What commands say of steps in the state "part".
PART_TEXT = (
    "the other shards of a committed step are on other hosts, in folders of their own; name those folders, too, to see"
    " all of it"
)

#: What to do about damaged files.
DAMAGE_TEXT = (
    "copy the files named above from another tier or a backup and check them with `resiliency ckpt verify`, or delete"
    " those step folders; a restart takes copies of other tiers, or an older step"
)


def size(nbytes: int) -> str:
    """Bytes as people read them: ``512 B``, ``4.1 KiB``, ``12.0 GiB``."""
    amount, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if amount < 1023.95:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"


def plural(count: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def utc(seconds: float | None) -> str:
    """ISO time, or "" when it is unknown."""
    if not seconds:
        return ""
    return datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def _minute(seconds: float | None) -> str:
    return utc(seconds)[:16].replace("T", " ")


def _id(step: StepId) -> dict[str, Any]:
    return {**step.to_dict(), "folder": step.dirname}


def step_json(view: StepView) -> dict[str, Any]:
    """A step as ``--json`` shows it."""
    return {
        **_id(view.id),
        "run": view.run,
        "state": view.state.value,
        "committed": view.state is StepState.COMMITTED,
        "names": list(view.names),
        "created": utc(view.created) or None,
        "nbytes": view.nbytes,
        "shards_present": len(view.present),
        "shards_needed": view.needed,
        "tiers": [copy.label for copy in view.copies],
        "info": dict(view.manifest.info) if view.manifest else {},
        "notes": view.notes,
    }


def ls_json(tiers: Sequence[LabeledTier], runs: Mapping[str, Sequence[StepView]]) -> dict[str, Any]:
    return {
        "tiers": {labeled.label: labeled.tier.root for labeled in tiers},
        "runs": {run: [step_json(view) for view in views] for run, views in runs.items()},
    }


def _table(*columns: tuple[str, Mapping[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name, options in columns:
        table.add_column(name, **options)
    return table


def print_ls(
    console: Console, tiers: Sequence[LabeledTier], runs: Mapping[str, Sequence[StepView]], *, now: float
) -> None:
    """Prints one table for each run, the oldest step first."""
    for labeled in tiers:
        console.print(f"[bold]{labeled.label}[/] {escape(labeled.tier.root)}", soft_wrap=True)
    for run, views in runs.items():
        committed = sum(view.state is StepState.COMMITTED for view in views)
        parts = sum(view.state is StepState.PART for view in views)
        total = size(sum(view.nbytes for view in views))
        counts = f"{committed} committed, " + (f"{parts} committed in part, " if parts else "")
        console.print(f"\n[bold]run {escape(run)}[/]: {plural(len(views), 'step')}, {counts}{total}")
        console.print(_ls_table(views, now, dates=console.width >= 100, show_tiers=len(tiers) > 1))
        if parts:
            console.print(f"part: {PART_TEXT}", soft_wrap=True)
        for view in views:
            for note in view.notes:
                console.print(
                    f"[{_COLORS[view.state]}]step {view.id.step} (attempt {view.id.attempt})[/]: {escape(note)}",
                    soft_wrap=True,
                )
        if any(view.state is StepState.DAMAGED for view in views):
            console.print(f"next: {DAMAGE_TEXT}", soft_wrap=True)


def _ls_table(views: Sequence[StepView], now: float, *, dates: bool, show_tiers: bool) -> Table:
    table = _table(
        ("step", {"justify": "right", "no_wrap": True}),
        ("att", {"justify": "right", "no_wrap": True}),
        ("names", {"overflow": "fold"}),
        *([("created (UTC)", {"no_wrap": True})] if dates else []),
        ("age", {"justify": "right", "no_wrap": True}),
        ("size", {"justify": "right", "no_wrap": True}),
        ("shards", {"justify": "right", "no_wrap": True}),
        *([("tiers", {"overflow": "fold"})] if show_tiers else []),
        ("state", {"no_wrap": True}),
    )
    for view in views:
        created = view.created
        cells = [str(view.id.step), str(view.id.attempt), escape("\n".join(view.names))]
        cells += [_minute(created)] if dates else []
        cells += ["" if created is None else duration(max(0.0, now - created)), size(view.nbytes)]
        cells += [f"{len(view.present)}/{'?' if view.needed is None else view.needed}"]
        cells += ["\n".join(copy.label for copy in view.copies)] if show_tiers else []
        table.add_row(*cells, f"[{_COLORS[view.state]}]{view.state}[/]")
    return table


def print_inspection(
    console: Console,
    view: StepView,
    shards: Mapping[int, ShardContents],
    rows: Sequence[TensorRow],
    tree: Sequence[Entry],
    *,
    limit: int | None,
) -> None:
    """Prints a step's facts, shards, tensors and the top of its state tree.

    Args:
        limit: at most this many tensors; None: all, including those that belong to single ranks.
    """
    _print_facts(console, view)
    if view.manifest is not None:
        console.print()
        console.print(_shard_table(view.manifest, view, shards))
    shared = [row for row in rows if not row.per_rank]
    own = [row for row in rows if row.per_rank]
    console.print(f"\n[bold]tensors[/]: {len(shared)}, {size(sum(row.nbytes for row in shared))}; {_own(own)}")
    if shared:
        console.print(_tensor_table([*shared, *(own if limit is None else [])], limit, console.width))
    if tree:
        console.print("\n[bold]state tree[/] (top level)")
        console.print(_tree_table(tree))


def _own(rows: Sequence[TensorRow]) -> str:
    if not rows:
        return "none belongs to a single rank"
    return f"and {len(rows)} that belong to single ranks, {size(sum(row.nbytes for row in rows))}"


def _print_facts(console: Console, view: StepView) -> None:
    info = dict(view.manifest.info) if view.manifest is not None else {}
    job = view.manifest.shards[0].job if view.manifest is not None and view.manifest.shards else {}
    tiers = view.manifest.tiers if view.manifest is not None else ()
    hosts = sorted({shard.node for shard in view.manifest.shards}) if view.manifest is not None else []
    facts = {
        "run": view.run,
        "step": f"{view.id.step}, attempt {view.id.attempt}, token {view.id.token}, serial {view.id.serial},"
        f" line {view.id.line}",
        "names": ", ".join(view.names),
        "created": utc(view.created),
        "size": size(view.nbytes),
        "written by": f"{plural(view.needed, 'rank') if view.needed else 'ranks'} on {', '.join(hosts) or '?'}",
        "tiers": ", ".join(copy.tier.root for copy in view.copies),
        "remote tiers": ", ".join(tiers),
        "info": ", ".join(f"{key} {value}" for key, value in info.items()),
        "job": ", ".join(f"{key} {value}" for key, value in job.items()),
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("state", f"[{_COLORS[view.state]}]{view.state}[/]")
    for name, text in facts.items():
        if text:
            table.add_row(name, escape(text))
    console.print(table)
    for note in view.notes:
        console.print(f"[bold]note[/] {escape(note)}", soft_wrap=True)
    if view.state is StepState.DAMAGED:
        console.print(f"[bold]next[/] {DAMAGE_TEXT}", soft_wrap=True)


def _shard_table(manifest: Manifest, view: StepView, shards: Mapping[int, ShardContents]) -> Table:
    table = _table(
        ("shard", {"no_wrap": True}),
        ("host", {"overflow": "fold"}),
        ("bytes", {"justify": "right", "no_wrap": True}),
        ("tensors", {"justify": "right"}),
        ("blocks", {"justify": "right"}),
        ("present", {}),
    )
    for record in manifest.shards:
        found = shards.get(record.rank)
        present = "yes" if record.rank in view.present else "[bold red]no[/]"
        table.add_row(
            record.file,
            escape(record.node),
            f"{record.nbytes:,}",
            str(found.stored_tensors) if found else "?",
            str(len(record.digests)),
            present if found or record.rank not in view.present else "[bold red]unreadable[/]",
        )
    return table


def _shards(ranks: Sequence[int]) -> str:
    """``0-3,7`` for the ranks 0, 1, 2, 3 and 7."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _tensor_table(rows: Sequence[TensorRow], limit: int | None, width: int) -> Table:
    shown = rows if limit is None else rows[:limit]
    table = _table(
        ("key", {"overflow": "fold", "max_width": max(20, width - 48)}),
        ("dtype", {"no_wrap": True}),
        ("shape", {"no_wrap": True}),
        ("size", {"justify": "right", "no_wrap": True}),
        ("shards", {"overflow": "fold"}),
    )
    for row in shown:
        shape = "x".join(map(str, row.shape)) or "scalar"
        only = f"rank {row.shards[0]} only" if row.per_rank else _shards(row.shards)
        table.add_row(escape(row.key), row.dtype, shape, size(row.nbytes), only)
    if len(shown) < len(rows):
        table.caption = f"{len(rows) - len(shown)} more; --tensors lists all"
        table.caption_justify = "left"
    return table


def _tree_table(tree: Sequence[Entry]) -> Table:
    table = _table(
        ("entry", {"overflow": "fold"}),
        ("kind", {"overflow": "fold"}),
        ("tensors", {"justify": "right"}),
        ("values", {"justify": "right"}),
        ("holds", {"overflow": "fold"}),
    )
    for entry in tree:
        table.add_row(escape(entry.path), escape(entry.kind), str(entry.tensors), str(entry.values), escape(entry.text))
    return table


def inspection_json(view: StepView, rows: Iterable[TensorRow], tree: Iterable[Entry]) -> dict[str, Any]:
    shards = view.manifest.shards if view.manifest is not None else ()
    return {
        **step_json(view),
        "shards": [
            {
                "rank": record.rank,
                "file": record.file,
                "host": record.node,
                "nbytes": record.nbytes,
                "blocks": len(record.digests),
                "present": record.rank in view.present,
            }
            for record in shards
        ],
        "tensors": [asdict(row) for row in rows],
        "tree": [asdict(entry) for entry in tree],
    }


def exported_json(done: Exported) -> dict[str, Any]:
    return {
        **_id(done.id),
        "path": done.path,
        "format": done.format,
        "nbytes": done.nbytes,
        "run": done.run,
        "tensors": done.tensors,
        "weights_only": done.weights_only,
        "unsafe": list(done.unsafe),
        "tied": dict(done.tied),
        "left_out": list(done.left_out),
    }


def imported_json(done: Imported) -> dict[str, Any]:
    return {
        **_id(done.id),
        "path": done.path,
        "run": done.run,
        "nbytes": done.nbytes,
    }


def finding_json(finding: Finding) -> dict[str, Any]:
    return {
        **_id(finding.id),
        "run": finding.run,
        "tier": finding.tier,
        "bad": finding.bad,
        "path": finding.path,
        "ranges": [list(pair) for pair in finding.ranges],
        "text": finding.text,
    }


def print_finding(console: Console, finding: Finding) -> None:
    word = "[bold red]bad[/] " if finding.bad else "[yellow]note[/]"
    console.print(f"{word} step {finding.id.step}: {escape(finding.path)} {escape(finding.text)}", soft_wrap=True)


def plan_json(plan: PrunePlan) -> dict[str, Any]:
    return {
        "delete": [
            {**_id(d.listing.id), "why": d.why, "nbytes": d.nbytes, "names": list(d.names)} for d in plan.deletions
        ],
        "kept": [{**_id(kept.id), "why": kept.why} for kept in plan.kept],
        "newest": _id(plan.newest.id) if plan.newest is not None else None,
        "nbytes": sum(deletion.nbytes for deletion in plan.deletions),
    }


def print_plan(console: Console, run: str, plan: PrunePlan) -> None:
    """Prints the steps to delete, the steps that stay and why, and the newest step."""
    table = _table(
        ("step", {"justify": "right", "no_wrap": True}),
        ("att", {"justify": "right", "no_wrap": True}),
        ("size", {"justify": "right", "no_wrap": True}),
        ("why", {"no_wrap": True}),
        ("names", {"overflow": "fold"}),
    )
    for deletion in plan.deletions:
        step = deletion.listing.id
        table.add_row(
            str(step.step), str(step.attempt), size(deletion.nbytes), deletion.why, escape(", ".join(deletion.names))
        )
    if plan.deletions:
        total = sum(deletion.nbytes for deletion in plan.deletions)
        steps = plural(len(plan.deletions), "step")
        console.print(f"[bold]run {escape(run)}[/]: {steps}, {size(total)} ({total:,} bytes) to delete")
        console.print(table)
    else:
        console.print(f"[bold]run {escape(run)}[/]: nothing to delete")
    for kept in plan.kept:
        console.print(
            f"[yellow]kept[/] step {kept.id.step} (attempt {kept.id.attempt}): {escape(kept.why)}", soft_wrap=True
        )
    if plan.newest is not None:
        console.print(f"newest step, which stays: {plan.newest.id.step} (attempt {plan.newest.id.attempt})")
