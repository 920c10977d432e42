"""``resiliency ckpt import``: makes a step of a checkpoint that torch or Lightning wrote."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from resiliency.cli._ckpt_common import JsonOption, bar, errors
from resiliency.paths import absolute_path

__all__ = ["import_"]


def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            parser=absolute_path,
            help="Folder of a distributed checkpoint (torch, Lightning), or a torch or Lightning file.",
        ),
    ],
    into: Annotated[
        str, typer.Option("--into", metavar="DIR", parser=absolute_path, help="Folder of the job's checkpoints.")
    ],
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the step in DIR; by default SOURCE's, ending in .ckpt.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="The run that gets the step.")] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Number of the step; by default the checkpoint's global_step.")
    ] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle",
            help="Unpickle objects of any class. This can run code from the checkpoint: use it only for files that you"
            " trust.",
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace the file that has the name, and go on from this step in a run that has others."
        ),
    ] = False,
    assume_ended: Annotated[
        bool,
        typer.Option("--assume-ended", help="Say that no other host uses DIR, which this host cannot check."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a step of this library, with digests, of a checkpoint that torch or Lightning wrote."""
    with errors():
        from resiliency.cli import _ckpt_tables as tables
        from resiliency.inspection.importing import bytes_of, import_checkpoint

        with bar("import", bytes_of(source), quiet=as_json) as advance:
            done = import_checkpoint(
                source,
                into,
                name=name,
                run=run,
                step=step,
                allow_pickle=allow_pickle,
                force=force,
                assume_ended=assume_ended,
                advance=advance,
            )
    if as_json:
        typer.echo(json.dumps(tables.imported_json(done), indent=2))
        return
    typer.echo(f"{done.path}: step {done.id.step} of run {done.run}, {tables.size(done.nbytes)}")
    typer.echo("a fit resumes from it with auto_resume=True or ckpt_path='last'")
