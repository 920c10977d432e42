"""``resiliency ckpt``: list, inspect, verify, convert and delete checkpoints.

Exit status: 0 all good; 1 something is damaged, or the command was refused or failed; 2 wrong arguments or path.
Imports torch for ``export`` and ``import`` only, so that the other commands start quickly.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from resiliency.cli._ckpt_common import (
    JsonOption,
    PathArgument,
    PathsArgument,
    RunOption,
    check,
    errors,
    fail,
    open_targets,
)
from resiliency.cli._ckpt_import import import_
from resiliency.cli._ckpt_prune import prune
from resiliency.cli._terminal import console
from resiliency.paths import absolute_path

if TYPE_CHECKING:
    from resiliency.inspection.contents import Entry, ShardContents, TensorRow
    from resiliency.inspection.survey import LabeledTier, StepView, Target
    from resiliency.inspection.verify import Finding

__all__ = ["app"]

app = typer.Typer(
    help="List, inspect, verify, convert and delete checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_TENSORS_SHOWN = 20


def _surveys(targets: list[Target], run: str | None) -> tuple[list[LabeledTier], dict[str, list[StepView]]]:
    """The tiers, and the steps of each run over all tiers; only the named steps when a path names one."""
    from resiliency.errors import NoCheckpointFound
    from resiliency.inspection.survey import label_tiers, runs_of, survey

    runs = runs_of(targets)
    if run is not None and run not in runs:
        raise NoCheckpointFound(f"there is no run {run!r}; there are: {', '.join(runs) or 'none'}")
    tiers = label_tiers(targets)
    named = {target.step for target in targets if target.step is not None}
    found = {}
    for name in [run] if run is not None else runs:
        views = survey(tiers, name)
        found[name] = [view for view in views if not named or view.id in named]
        for target in targets:
            for view in found[name]:
                if target.name is not None and (target.run, target.step) == (view.run, view.id):
                    view.names = tuple(dict.fromkeys((*view.names, target.name)))  # may be the user's own copy
        for target in targets:
            if target.step is not None and target.step not in {view.id for view in views}:
                _refuse(target, name)
    return tiers, found


def _refuse(target: Target, run: str) -> NoReturn:
    """Raises the error about a path whose step is not there: its file is damaged, or it is gone."""
    from resiliency.errors import NoCheckpointFound
    from resiliency.inspection.survey import refuse_damaged

    if target.name is not None and target.tier.is_local:
        refuse_damaged(target.tier.location(target.name))
    root = target.tier.root
    raise NoCheckpointFound(
        f"{target.path}: {target.step} of run {run!r} is not in {root}; `resiliency ckpt ls {root}` shows what is there"
    )


@app.command()
def ls(paths: PathsArgument, run: RunOption = None, as_json: JsonOption = False) -> None:
    """List the steps of each run. Several paths are taken as tiers of one job."""
    with open_targets(paths) as targets:
        tiers, runs = _surveys(targets, run)
        from resiliency.cli import _ckpt_tables as tables

        if as_json:
            typer.echo(json.dumps(tables.ls_json(tiers, runs), indent=2))
            return
        if not runs:
            typer.echo(f"no checkpoints in {', '.join(labeled.tier.root for labeled in tiers)}")
            return
        tables.print_ls(console(), tiers, runs, now=time.time())


@app.command()
def inspect(
    path: PathArgument,
    run: RunOption = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help=f"List all tensors instead of the {_TENSORS_SHOWN} largest.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what is inside one step: the named one, or the newest committed one."""
    from resiliency.inspection.survey import StepState, label_tiers, one_step, survey

    with open_targets([path]) as targets:
        name, step = one_step(targets[0], run=run)
        views = [view for view in survey(label_tiers(targets), name) if view.id == step]
        if not views:
            _refuse(replace(targets[0], step=step), name)
        view = views[0]
        shards, rows, tree, problems = _contents(view)
        view.notes += problems
        from resiliency.cli import _ckpt_tables as tables

        if as_json:
            typer.echo(json.dumps(tables.inspection_json(view, rows, tree), indent=2))
        else:
            tables.print_inspection(console(), view, shards, rows, tree, limit=None if tensors else _TENSORS_SHOWN)
        if problems or view.state is StepState.DAMAGED:
            raise typer.Exit(1)


def _contents(view: StepView) -> tuple[dict[int, ShardContents], list[TensorRow], list[Entry], list[str]]:
    """Contents by rank, tensors, the top of the state tree, and a sentence for each shard that could not be read."""
    from resiliency.errors import ResiliencyError
    from resiliency.inspection.contents import entries, read_contents, tensor_rows

    shards: dict[int, ShardContents] = {}
    problems: list[str] = []
    for copy in view.copies:
        for rank, record in sorted(copy.listing.records.items()):
            if rank in shards or record.file not in copy.listing.sizes:
                continue
            try:
                key, single = copy.listing.key(record), bool(copy.listing.single)
                shards[rank] = read_contents(copy.tier, view.run, record, key=key, single=single)
            except ResiliencyError as error:
                problems.append(str(error))
    tree = entries(shards[0].tree) if 0 in shards else []
    return shards, tensor_rows(shards), tree, problems


@app.command()
def verify(paths: PathsArgument, run: RunOption = None, as_json: JsonOption = False) -> None:
    """Read every byte of all committed steps (or of the named one) and compare it with what was written."""
    from resiliency.inspection.survey import StepState, damaged_files
    from resiliency.inspection.verify import bytes_to_check

    with open_targets(paths) as targets:
        tiers, runs = _surveys(targets, run)
        named = any(target.step is not None for target in targets)
        views = [view for found in runs.values() for view in found if named or view.state is not StepState.UNFINISHED]
        skipped = [view for found in runs.values() for view in found if view not in views]
        files = damaged_files(targets) if run is None else {}
        if not views and not files:
            root = tiers[0].tier.root
            why = f" ({skipped[-1].id} is unfinished: {skipped[-1].notes[0]})" if skipped else ""
            fail(
                f"no committed checkpoint to verify in {root}{why}; `resiliency ckpt ls {root}` shows what is there", 2
            )
        began = time.monotonic()
        findings = check(views, as_json)
        seconds = time.monotonic() - began
        checked = sum(map(bytes_to_check, views))
        bad = {(finding.run, finding.id) for finding in findings if finding.bad}
        good = (StepState.COMMITTED, StepState.PART)
        bad |= {(view.run, view.id) for view in views if view.state not in good}
        for known in {finding.path for finding in findings} & files.keys():
            del files[known]
        if as_json:
            _verify_json(views, findings, bad, files, skipped, checked)
        else:
            _verify_text(views, findings, bad, files, skipped, f"{checked:,} bytes in {seconds:.1f} s")
        if bad or files:
            raise typer.Exit(1)


def _verify_json(
    views: list[StepView],
    findings: list[Finding],
    bad: set[Any],
    files: dict[str, str],
    skipped: list[StepView],
    checked: int,
) -> None:
    from resiliency.cli import _ckpt_tables as tables

    data = {
        "good": not bad and not files,
        "checked_bytes": checked,
        "steps": [{**tables.step_json(view), "good": (view.run, view.id) not in bad} for view in views],
        "findings": [tables.finding_json(finding) for finding in findings],
        "damaged_files": files,
        "skipped": [tables.step_json(view) for view in skipped],
    }
    typer.echo(json.dumps(data, indent=2))


def _verify_text(
    views: list[StepView],
    findings: list[Finding],
    bad: set[Any],
    files: dict[str, str],
    skipped: list[StepView],
    figures: str,
) -> None:
    from resiliency.cli import _ckpt_tables as tables
    from resiliency.inspection.survey import StepState

    out = console()
    for finding in findings:
        tables.print_finding(out, finding)
    for path, why in files.items():
        typer.echo(f"bad  {path} is no step any more: {why.removeprefix(f'{path}: ')}")
    for view in skipped:
        typer.echo(
            f"skip step {view.id.step} (attempt {view.id.attempt}) of run {view.run}: unfinished, nothing resumes from"
            f" it: {view.notes[0]}"
        )
    parts = sum(view.state is StepState.PART for view in views)
    if parts:
        typer.echo(f"part {tables.plural(parts, 'step')}: {tables.PART_TEXT}")
    if not bad and not files:
        typer.echo(f"all good: {tables.plural(len(views), 'step')}, {figures}")
        return
    typer.echo(f"{len(bad)} of {tables.plural(len(views), 'step')} {'is' if len(bad) == 1 else 'are'} bad ({figures})")
    if files:
        typer.echo("next: put back good copies of the files named above, or delete them")
    for name in sorted({run for run, _ in bad}):
        typer.echo(f"next: {_advice(name, views, bad)}")


def _advice(run: str, views: list[StepView], bad: set[Any]) -> str:
    steps = [view.id for view in views if view.run == run]
    good = [step for step in steps if (run, step) not in bad]
    if good and good[-1] == steps[-1]:
        resume = f"a restart of run {run} resumes from step {good[-1].step}, which is good"
    elif good:
        resume = (
            f"a restart of run {run} refuses the bad copies and takes good ones from the job's other tiers, or an older"
            f" step (step {good[-1].step} is good)"
        )
    else:
        resume = (
            f"no step of run {run} is good here: a restart takes copies from the job's other tiers,"
            " or stops and names the damaged files"
        )
    return (
        f"{resume}. Copy the files named above from another tier or a backup and verify again,"
        " or delete those step folders"
    )


@app.command()
def export(
    path: PathArgument,
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT", parser=absolute_path, help="The file (OUT.ckpt or OUT.safetensors) or folder to write."
        ),
    ],
    format: Annotated[
        str | None,
        typer.Option("--format", help="ckpt (or torch), safetensors, or dcp; by default OUT's suffix decides."),
    ] = None,
    run: RunOption = None,
    key: Annotated[
        str, typer.Option("--key", help="Entry of the state whose tensors are written (safetensors).")
    ] = "state_dict",
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle",
            help="Unpickle objects of your own classes (where files are not copied). This can run code from the"
            " checkpoint: use it only for files that you trust.",
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a step as a stock torch/Lightning .ckpt or distributed checkpoint, or its weights as .safetensors."""
    with errors():
        from resiliency.inspection.export import export as run_export
        from resiliency.inspection.export import format_of

        done = run_export(
            path, out, format=format_of(Path(out), format), run=run, allow_pickle=allow_pickle, force=force, key=key
        )
    from resiliency.cli import _ckpt_tables as tables

    if as_json:
        typer.echo(json.dumps(tables.exported_json(done), indent=2))
        return
    what = f"{tables.plural(done.tensors, 'tensor')}, {tables.size(done.nbytes)}"
    typer.echo(f"{out}: step {done.id.step} of run {done.run}, {what}, every shard verified")
    if done.format == "ckpt":
        how = (
            "weights_only=True"
            if done.weights_only
            else f"weights_only=False, because it holds {', '.join(done.unsafe)}"
        )
        typer.echo(f"loads with torch.load(..., {how})")
    if done.format == "dcp":
        typer.echo("loads with torch.distributed.checkpoint.load(..., checkpoint_id=...)")
    for name, first in done.tied.items():
        typer.echo(f"note: {name} is tied to {first}; both are in the file in full")
    if done.left_out:
        typer.echo(f"note: left out, because they are not tensors: {', '.join(done.left_out)}")


app.command("import")(import_)
app.command()(prune)
