"""``resiliency ckpt prune``: shows what would be deleted, checks that no job uses the run, and deletes it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resiliency.cli._ckpt_common import JsonOption, check, fail, open_targets
from resiliency.cli._terminal import console
from resiliency.paths import absolute_path

if TYPE_CHECKING:
    from resiliency.inspection.pruning import PrunePlan
    from resiliency.inspection.survey import Target

__all__ = ["prune"]


def prune(
    path: Annotated[
        str, typer.Argument(metavar="DIR", parser=absolute_path, help="Checkpoint folder, or the URL of one.")
    ],
    keep: Annotated[
        int | None,
        typer.Option("--keep", min=1, help="Keep this many of the newest committed steps, with or without a name."),
    ] = None,
    unfinished: Annotated[
        bool,
        typer.Option("--unfinished", help="Delete uncommitted steps that are older than the newest committed step."),
    ] = False,
    run: Annotated[str | None, typer.Option("--run", help="The run to prune; needed when there are several.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    assume_ended: Annotated[
        bool,
        typer.Option(
            "--assume-ended",
            help="Say that no other host uses the folder (of a URL: no host at all), which this host cannot check.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete old or unfinished steps of one run. The newest committed step always stays."""
    if keep is None and not unfinished:
        fail("say what to delete: --keep N, --unfinished, or both", 2)
    if as_json and not (yes or dry_run):
        fail("--json does not ask; say --dry-run or --yes with it", 2)
    with open_targets([path]) as targets:
        from resiliency.cli import _ckpt_tables as tables
        from resiliency.inspection.pruning import plan_pruning
        from resiliency.storage.catalog import scan

        target = targets[0]
        name = _one_run(target, run)
        if target.step is not None:
            fail(f"{path} is one step; prune takes the folder: {target.tier.root}", 2)
        listings = scan(target.tier, name)
        plan = plan_pruning(listings, keep=keep, unfinished=unfinished)
        if not as_json:
            tables.print_plan(console(), name, plan)
        result = {"run": name, **tables.plan_json(plan), "deleted": [], "freed_bytes": 0}
        if plan.deletions and not dry_run:
            hosts = {record.node for listing in listings for record in listing.records.values()}
            _refuse_if_in_use(target, name, hosts, assume_ended)
            _refuse_if_newest_is_bad(target, name, plan, as_json)
            if not yes and not _confirmed():
                fail("nothing was deleted", 1)
            result |= _delete(target, name, plan, hosts, assume_ended, as_json)
        if as_json:
            typer.echo(json.dumps(result, indent=2))


def _one_run(target: Target, run: str | None) -> str:
    from resiliency.inspection.survey import runs_of

    runs = [target.run] if target.run is not None else runs_of([target])
    if run is not None and run not in runs:
        fail(f"there is no run {run!r} in {target.tier.root}; there are: {', '.join(runs) or 'none'}", 2)
    if run is None and len(runs) != 1:
        what = f"several runs ({', '.join(runs)}); choose one with --run" if runs else "no run"
        fail(f"{target.tier.root} holds {what}", 2)
    return run or runs[0]


def _refuse_if_in_use(target: Target, run: str, hosts: set[str], assume_ended: bool) -> None:
    from resiliency.inspection.liveness import evidence_of_use

    if not target.tier.is_local:
        if not assume_ended:
            fail(
                f"this host cannot see whether a job is using {target.tier.root}; if you know that none is, say"
                " --assume-ended",
                1,
            )
        return
    seen = [one for one in evidence_of_use(target.tier.root, run, hosts=hosts) if one.certain or not assume_ended]
    if seen:
        more = "" if any(one.certain for one in seen) else ", or say --assume-ended if that rank is gone"
        texts = "; ".join(one.text for one in seen[:3]) + (f"; and {len(seen) - 3} more" if len(seen) > 3 else "")
        fail(f"run {run} in {target.tier.root} is in use: {texts}. End the job first{more}", 1)


def _refuse_if_newest_is_bad(target: Target, run: str, plan: PrunePlan, quiet: bool) -> None:
    """Verifies the newest step before any deletion: an older step may be the only good one."""
    from resiliency.inspection.survey import label_tiers, survey

    assert plan.newest is not None
    views = [view for view in survey(label_tiers([target]), run) if view.id == plan.newest.id]
    bad = [finding for finding in check(views, quiet) if finding.bad]
    if bad or not views:
        what = f"{bad[0].path} {bad[0].text}" if bad else "it is gone"
        fail(f"nothing was deleted, because the newest step, {plan.newest.id.step}, is not good: {what}", 1)


def _confirmed() -> bool:
    if not sys.stdin.isatty():
        fail("nothing was deleted: there is no terminal to ask on; say --yes or --dry-run", 2)
    return typer.confirm("Delete these steps?")


def _delete(
    target: Target, run: str, plan: PrunePlan, hosts: set[str], assume_ended: bool, quiet: bool
) -> dict[str, Any]:
    from resiliency.cli._ckpt_tables import size
    from resiliency.inspection.pruning import delete

    deleted, freed = [], 0
    for deletion in plan.deletions:
        # A job may have started since the last check. The step it resumes from is never in the plan, but it may delete
        # steps itself.
        _refuse_if_in_use(target, run, hosts, assume_ended)
        names = delete(target.tier, run, deletion)
        freed += deletion.nbytes
        deleted.append({"folder": deletion.listing.id.dirname, "nbytes": deletion.nbytes, "names": names})
        if not quiet:
            step = deletion.listing.id
            also = f", and {', '.join(names)}" if names else ""
            typer.echo(f"deleted step {step.step} (attempt {step.attempt}), {deletion.nbytes:,} bytes{also}")
    if not quiet:
        typer.echo(f"freed {size(freed)} ({freed:,} bytes)")
    return {"deleted": deleted, "freed_bytes": freed}
