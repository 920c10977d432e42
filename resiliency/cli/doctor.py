"""``resiliency doctor``: checks what of this library would work on this host, and prints a table with what to do."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Annotated, NoReturn

import typer

from resiliency.cli._terminal import console, table
from resiliency.doctor.facts import examine_folder, examine_host, examine_remote
from resiliency.doctor.rules import (
    HostFinding,
    Verdict,
    judge_folder,
    judge_host,
    judge_ports,
    judge_ramdisk,
    judge_remote,
)
from resiliency.errors import ConfigError, ResiliencyError
from resiliency.paths import absolute_path
from resiliency.settings import all_variables
from resiliency.storage.tiers._address import local_path

__all__ = ["app"]

app = typer.Typer(add_completion=False, no_args_is_help=False)

_COLORS = {Verdict.OK: "green", Verdict.NOTE: "cyan", Verdict.WARNING: "yellow", Verdict.BROKEN: "bold red"}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@app.callback(invoke_without_command=True)
def doctor(
    directory: Annotated[
        str,
        typer.Option(
            "--dir",
            metavar="DIR",
            parser=absolute_path,
            help="Folder or URL to write checkpoints to.",
            show_default="this folder",
        ),
    ] = ".",
    ramdisk: Annotated[
        str, typer.Option("--ramdisk", metavar="DIR", parser=absolute_path, help="Folder for a local tier in memory.")
    ] = "/dev/shm",
    remote: Annotated[
        list[str] | None,
        typer.Option(
            "--remote",
            metavar="URL",
            parser=absolute_path,
            help="Slower tier to try with a small object, for example gs://bucket/job; repeatable.",
        ),
    ] = None,
    state: Annotated[
        str,
        typer.Option(
            "--state", help="Sum of what the ranks of this host save, for example 10GiB.", show_default="unknown"
        ),
    ] = "0",
    port: Annotated[int, typer.Option("--port", help="Port at which the ranks meet.", min=1, max=65535)] = 29500,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            metavar="FILE",
            parser=absolute_path,
            help="Settings of a supervisor with cluster: kubernetes; says what that cluster lacks, not this host.",
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Says what would work on this host, or in a cluster, and what to do where it would not.

    Writes and removes small files in the folders, and an object in each slower tier. Exit status: 0 nothing is broken,
    1 something is, 2 wrong arguments.
    """
    if cluster:
        _report(_judge_cluster(cluster), as_json=as_json)
    try:
        state_bytes = parse_size(state)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--state") from None
    try:
        folder = local_path(directory)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--dir") from None
    host = examine_host(all_variables())
    findings = [
        *judge_host(host),
        # Like dirpath=, --dir may be the address of an object store, which is checked as a slower tier.
        *([judge_remote(examine_remote(directory))] if folder is None else ()),
        *(judge_folder(examine_folder(folder), host, state_bytes=state_bytes) if folder is not None else ()),
        *judge_ramdisk(examine_folder(ramdisk), host, state_bytes=state_bytes),
        *(judge_remote(examine_remote(address)) for address in remote or ()),
        judge_ports(host, port, free=_is_free(port)),
    ]
    _report(findings, as_json=as_json)


def _report(findings: list[HostFinding], *, as_json: bool) -> NoReturn:
    if as_json:
        rows = [
            {"check": one.check, "verdict": one.verdict.value, "found": one.found, "remedy": one.remedy}
            for one in findings
        ]
        typer.echo(json.dumps(rows, indent=2))
    else:
        _print(findings)
    raise typer.Exit(int(any(one.verdict is Verdict.BROKEN for one in findings)))


def _judge_cluster(file: str) -> list[HostFinding]:
    try:
        from resiliency.supervisor.clusters import kubernetes
        from resiliency.supervisor.settings import read_settings

        found = asyncio.run(kubernetes.check(read_settings(file)))
    except ModuleNotFoundError as error:
        raise typer.BadParameter(
            f"{error.name} is missing: pip install 'resiliency[supervisor]'", param_hint="--cluster"
        ) from None
    except ResiliencyError as error:
        return [HostFinding(check="cluster", verdict=Verdict.BROKEN, found=str(error))]
    return [
        HostFinding(
            check=one.what,
            verdict=Verdict.BROKEN if one.problem else Verdict.OK,
            found=one.problem or one.found,
            remedy=one.remedy,
        )
        for one in found
    ]


def parse_size(text: str) -> int:
    """Bytes of ``10GiB``, ``512M``, ``1073741824``; units are powers of 1024.

    Raises:
        ConfigError: ``text`` has another form.
    """
    number = text.strip().rstrip("iBb")
    unit = number[-1:].upper() if number[-1:].isalpha() else ""
    try:
        size = float(number.removesuffix(number[-1:]) if unit else number) * _UNITS[unit]
        if not 0 <= size < float("inf"):
            raise ValueError
    except (KeyError, ValueError):
        raise ConfigError(f"{text!r} is no size; write it as 10GiB or 512M") from None
    return int(size)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", port))
        except OSError:
            return False
    return True


def _print(findings: list[HostFinding]) -> None:
    from rich.markup import escape

    rows = table("", "check", "found", "what to do")
    for one in findings:
        color = _COLORS[one.verdict]
        rows.add_row(f"[{color}]{one.verdict.value}[/]", escape(one.check), escape(one.found), escape(one.remedy))
    screen = console()
    screen.print(rows)
    counts = {verdict: sum(one.verdict is verdict for one in findings) for verdict in (Verdict.BROKEN, Verdict.WARNING)}
    screen.print(f"{counts[Verdict.BROKEN]} broken, {counts[Verdict.WARNING]} to look at", highlight=False)
