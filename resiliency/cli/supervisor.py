"""``resiliency supervisor``: runs the supervisor, and has the commands for a running one."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from resiliency.cli._terminal import console, table
from resiliency.goodput.words import duration
from resiliency.paths import absolute_path

if TYPE_CHECKING:
    from resiliency.supervisor.client import OperatorClient
    from resiliency.supervisor.settings import SupervisorSettings

__all__ = ["app"]

app = typer.Typer(
    help="Watch training jobs on many hosts, and recover them from failures.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

UrlOption = Annotated[
    list[str] | None,
    typer.Option(
        "--supervisor",
        "-s",
        metavar="URL",
        help="Address of the supervisor. When there are several, repeat the option or put"
        " commas between the addresses; the one that leads is asked.",
        envvar="RESILIENCY_SUPERVISOR",
        show_envvar=True,
        show_default="http://127.0.0.1:7600",
    ),
]
TokenOption = Annotated[
    str,
    typer.Option(
        "--token-file",
        metavar="FILE",
        parser=absolute_path,
        help="File with the operators' token.",
        envvar="RESILIENCY_SUPERVISOR_TOKEN_FILE",
    ),
]
CaOption = Annotated[
    str,
    typer.Option(
        "--ca", metavar="FILE", parser=absolute_path, help="File with the CA certificates to trust for https."
    ),
]
CertOption = Annotated[
    str, typer.Option("--cert", metavar="FILE", parser=absolute_path, help="File with this client's certificate.")
]
KeyOption = Annotated[
    str, typer.Option("--key", metavar="FILE", parser=absolute_path, help="File with the private key of --cert.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="The reason, for the history of events.")]
#: Options of a connection to the supervisor, with their defaults.
_CONNECTION: dict[str, tuple[Any, Any]] = {
    "supervisor": (UrlOption, None),
    "token_file": (TokenOption, ""),
    "ca": (CaOption, ""),
    "cert": (CertOption, ""),
    "key": (KeyOption, ""),
}
#: Sends a request for a path of the supervisor's API; ends the command with one line when it fails.
Ask = Callable[..., dict[str, Any]]
#: Columns of numbers.
_RIGHT = ("for", "generation", "step", "goodput")
_LOCAL = "http://127.0.0.1:7600"
#: Open files that the process needs besides its connections.
_OTHER_FILES = 256
#: Exit status of ``run --until-ended`` when a workload was stopped, the same as that of ``resiliency run``.
_STOPPED = 3
#: Colour of each state.
_COLORS = {
    "ready": "green",
    "running": "green",
    "completed": "green",
    "joining": "cyan",
    "starting": "cyan",
    "waiting": "yellow",
    "remedying": "yellow",
    "quarantined": "yellow",
    "cordoned": "magenta",
    "frozen": "bold red",
    "silent": "bold red",
    "stopped": "bold red",
}


def _fail(message: str, status: int = 1) -> NoReturn:
    typer.echo(f"supervisor: {message}", err=True)
    raise typer.Exit(status)


# -- run --------------------------------------------------------------------------------------------------------------


@app.command()
def run(
    file: Annotated[
        str,
        typer.Option("-f", "--file", metavar="FILE", parser=absolute_path, help="The supervisor's settings."),
    ] = "supervisor.yaml",
    check: Annotated[bool, typer.Option("--check", help="Check the settings, print them and end.")] = False,
    listen: Annotated[
        str | None, typer.Option("--listen", help="HOST:PORT to listen at, instead of the file's.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done about failures.")] = False,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure-no-authentication",
            help="Obey everyone who can connect. Only for a machine that nobody else can reach.",
        ),
    ] = False,
    until_ended: Annotated[
        bool,
        typer.Option(
            "--until-ended", help="End when all workloads have ended; exit status 0 all completed, 3 one was stopped."
        ),
    ] = False,
    begin_again: Annotated[
        bool, typer.Option("--begin-again", help="Start workloads again that have completed or were stopped.")
    ] = False,
    address_file: Annotated[
        str,
        typer.Option(
            "--address-file", metavar="FILE", parser=absolute_path, help="File to write HOST:PORT to, once it listens."
        ),
    ] = "",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Supervise the workloads of a file until SIGTERM. A second supervisor with the same file is a standby."""
    import logging

    from resiliency.errors import ResiliencyError

    try:
        settings = _settings(file, listen=listen, dry_run=dry_run, insecure=insecure)
        if check:
            _print_settings(settings, file)
            return
        level = logging.DEBUG if verbose else logging.INFO
        logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
        if settings.insecure_no_authentication:
            logging.getLogger(__name__).warning("no authentication: anyone who can connect controls the jobs")
        completed = _run(settings, file, until_ended=until_ended, begin_again=begin_again, address_file=address_file)
    except ResiliencyError as error:
        _fail(str(error), 2)
    if not completed:
        raise typer.Exit(_STOPPED)


def _settings(file: str, *, listen: str | None, dry_run: bool, insecure: bool) -> SupervisorSettings:
    try:
        from resiliency.supervisor.settings import read_settings
    except ImportError as error:
        _fail(f"{error.name} is not installed; install resiliency[supervisor]", 2)
    changes = {"listen": listen, "dry_run": dry_run or None, "insecure_no_authentication": insecure or None}
    return read_settings(file, changes)


def _run(settings: SupervisorSettings, file: str, *, until_ended: bool, begin_again: bool, address_file: str) -> bool:
    """Runs the supervisor until a signal or, with ``until_ended``, until all workloads have ended. Returns False when
    one of these was stopped, else True."""
    import asyncio
    import os
    import signal

    from resiliency.supervisor.event_log import EventLog
    from resiliency.supervisor.garbage import collected_by_the_clock
    from resiliency.supervisor.model import WorkloadState
    from resiliency.supervisor.server import Supervisor

    _allow_connections(settings.most_connections, hosts=sum(spec.hosts for spec in settings.workloads))
    log = EventLog(settings.events)

    def listens(host: str, port: int) -> None:
        if address_file:
            with open(f"{address_file}~", "w") as written:
                written.write(f"{host}:{port}")
            os.replace(f"{address_file}~", address_file)

    async def main() -> bool:
        supervisor = Supervisor(
            settings,
            log=log.write,
            listens=listens,
            until_ended=until_ended,
            begin_again=begin_again,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, supervisor.stop)
        async with collected_by_the_clock():
            await supervisor.run()
        return all(each.state is WorkloadState.COMPLETED for each in supervisor.ended or ())

    try:
        return asyncio.run(main())
    finally:
        log.close()


def _allow_connections(most: int, *, hosts: int) -> None:
    """Raises this process's limit of open files, because each connection takes one and a shell usually allows 1,024.
    Logs a warning when the limit stays low for so many ``hosts``."""
    import logging
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = most + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed - _OTHER_FILES < 2 * hosts:
            logging.getLogger(__name__).warning(
                "%d files may be open here, which is hardly enough for %d hosts and their spares: raise it with"
                " ulimit -n",
                allowed,
                hosts,
            )


def _print_settings(settings: SupervisorSettings, file: str) -> None:
    from dataclasses import asdict

    from resiliency.supervisor.auth import Authority, server_context
    from resiliency.supervisor.policy import load_policy

    Authority.of(settings)
    server_context(settings.tls)
    load_policy(settings.policy)
    values = settings.model_dump(mode="python", exclude={"workloads"})
    values["sensor"] = asdict(settings.sensor)
    values["workloads"] = [asdict(spec) for spec in settings.workloads]
    typer.echo(json.dumps(values, indent=2, default=str))
    for spec in settings.workloads:
        ranks = spec.hosts * spec.ranks_per_host
        typer.echo(
            f"{spec.name}: {spec.replicas} replicas of {spec.hosts_per_replica} hosts with {spec.ranks_per_host} ranks"
            f" each: {ranks} ranks; goes on with {spec.min_replicas} replicas or more",
            err=True,
        )
    typer.echo(f"{file} is good", err=True)


# -- ask --------------------------------------------------------------------------------------------------------------


def _client(urls: list[str] | None, token_file: str, ca: str, cert: str, key: str) -> OperatorClient:
    from resiliency.errors import ConfigError
    from resiliency.supervisor.client import OperatorClient

    token = ""
    if token_file:
        try:
            with open(token_file, encoding="utf-8") as file:
                token = file.read().strip()
        except OSError as error:
            _fail(f"the token file {token_file} cannot be read: {error.strerror}", 2)
    try:
        return OperatorClient(*(urls or [_LOCAL]), token=token, ca=ca, cert=cert, key=key)
    except ConfigError as error:
        _fail(str(error), 2)


def _asks(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator for a command whose first argument asks a supervisor: gives it the options of a connection instead."""

    def called(**given: Any) -> None:
        from resiliency.errors import AgentError

        client = _client(*(given.pop(name) for name in _CONNECTION))

        def ask(path: str, *, post: bool = False, **query: object) -> dict[str, Any]:
            try:
                return client.post(path, **query) if post else client.get(path, **query)
            except AgentError as error:
                _fail(str(error))

        command(ask, **given)

    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    kind = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(name, kind, default=one[1], annotation=one[0]) for name, one in _CONNECTION.items()]
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in (*own, *more)}
    return called


@app.command()
@_asks
def status(
    ask: Ask,
    as_json: JsonOption = False,
) -> None:
    """Show workloads, hosts and the latest incidents."""
    found = ask("/v1/status")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.markup import escape

    screen = console(width=140)
    if found["store_problem"]:
        screen.print(f"[bold red]the state file cannot be written: {escape(found['store_problem'])}[/]")
    if found["frozen"]:
        screen.print("[bold red]frozen: more than half of the hosts are silent at once; nothing is done about any[/]")
    if found["dry_run"]:
        screen.print("[yellow]dry run: nothing is carried out[/]")
    workloads = table(
        "workload",
        "state",
        "for",
        "generation",
        "step",
        "goodput",
        "replicas",
        "restarts",
        "what is done",
        right=_RIGHT,
    )
    for each in found["workloads"]:
        workloads.add_row(
            escape(each["name"]),
            _colored(each["state"]),
            duration(each["for_s"]),
            str(each["generation"]),
            str(each["step"]) if each["step"] >= 0 else "",
            "" if each["goodput"] is None else f"{each['goodput']:.1%}",
            f"{each['replicas']}/{each['wanted_replicas']} (at least {each['min_replicas']})",
            f"{each['in_job_restarts']}/{each['max_in_job_restarts']} in job, "
            f"{each['workload_restarts']}/{each['max_workload_restarts']} whole",
            escape(_doing(each)),
        )
    screen.print(workloads)
    machines = ["machine"] if any(each["machine"] for each in found["hosts"]) else []
    hosts = table("host", *machines, "state", "for", "heard", "workload", "node rank", "block", "why", right=_RIGHT)
    for each in found["hosts"]:
        hosts.add_row(
            escape(each["name"]),
            *(escape(each[name]) for name in machines),
            _colored(each["state"]),
            duration(each["for_s"]),
            "" if each["heard_ago_s"] is None else f"{each['heard_ago_s']:.1f} s ago",
            escape(each["workload"]),
            "" if each["node_rank"] is None else str(each["node_rank"]),
            escape(each["block"]),
            escape(each["reason"]),
        )
    screen.print(hosts)
    for each in found["incidents"][:5]:
        state = "open" if each["open"] else each["outcome"]
        seen = each["observations"][0]["text"] if each["observations"] else ""
        screen.print(
            f"incident {each['number']} of {escape(each['workload'])}, {_clock(each['opened_at'])}: {escape(seen)}"
            f" ({escape(state)})"
        )


@app.command()
@_asks
def events(
    ask: Ask,
    workload: Annotated[str, typer.Option("--workload", help="Only events of this workload.")] = "",
    host: Annotated[str, typer.Option("--host", help="Only events of this host.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=2000, help="Number of events, the newest.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Print the history: what was seen, decided and done."""
    found = ask("/v1/events", workload=workload, host=host, limit=limit)
    if as_json:
        typer.echo(json.dumps(found["events"], indent=2))
        return
    for event in found["events"]:
        about = f" (incident {event['incident']})" if event["incident"] is not None else ""
        typer.echo(f"{_clock(event['at'])}  {event['kind']:<18} {event['text']}{about}")


@app.command()
@_asks
def explain(
    ask: Ask,
    incident: Annotated[str, typer.Argument(help="Number of an incident, or last.")] = "last",
    as_json: JsonOption = False,
) -> None:
    """Say what was seen in an incident, what was done, and why."""
    found = ask(f"/v1/explain/{incident}")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    state = "open" if found["open"] else f"over since {_clock(found['closed_at'])}: {found['outcome']}"
    typer.echo(f"incident {found['number']} of {found['workload']}, since {_clock(found['opened_at'])}, {state}")
    if found["now"]:
        typer.echo(f"now: {found['now']}")
    typer.echo("seen:")
    for one in found["observations"]:
        typer.echo(f"  {one['text']} (generation {one['generation']})")
    if not found["plans"]:
        typer.echo("nothing was done" + (f": {found['outcome']}" if found["outcome"] else " so far"))
    for plan in found["plans"]:
        out = f" {', '.join(plan['out'])}" if plan["out"] else ""
        typer.echo(f"plan {plan['number']}: {plan['remedy']}{out}, because {plan['why'] or 'the policy says so'}")
        for step in plan["steps"]:
            mark = {"done": "x", "now": ">"}.get(step["state"], " ")
            limit = f"at most {step['timeout_s']:.0f} s" + ("" if step["required"] else ", may fail")
            on = f" on {', '.join(step['hosts'])}" if step["hosts"] else ""
            typer.echo(f"  [{mark}] {step['text']}{on} ({limit})")
        why = f": {plan['reason']}" if plan["reason"] else ""
        typer.echo(f"  {plan['outcome']}{why}")


@app.command()
@_asks
def drain(
    ask: Ask,
    host: Annotated[str, typer.Argument(help="Name of the host.")],
    reason: ReasonOption = "",
) -> None:
    """Take a host out: after a checkpoint a spare takes over its ranks, and it gets no ranks until `uncordon`."""
    typer.echo(ask(f"/v1/hosts/{host}/drain", post=True, reason=reason)["done"])


@app.command()
@_asks
def uncordon(
    ask: Ask,
    host: Annotated[str, typer.Argument(help="Name of the host.")],
) -> None:
    """Make a drained host available again."""
    typer.echo(ask(f"/v1/hosts/{host}/uncordon", post=True)["done"])


@app.command()
@_asks
def stop(
    ask: Ask,
    workload: Annotated[str, typer.Argument(help="Name of the workload.")],
    reason: ReasonOption = "",
) -> None:
    """Stop a workload for good; `start` begins it again."""
    typer.echo(ask(f"/v1/workloads/{workload}/stop", post=True, reason=reason)["done"])


@app.command()
@_asks
def start(
    ask: Ask,
    workload: Annotated[str, typer.Argument(help="Name of the workload.")],
) -> None:
    """Begin a workload again that was stopped or has completed."""
    typer.echo(ask(f"/v1/workloads/{workload}/start", post=True)["done"])


# -- words ------------------------------------------------------------------------------------------------------------


def _colored(state: str) -> str:
    return f"[{_COLORS.get(state, 'default')}]{state}[/]"


def _doing(workload: dict[str, Any]) -> str:
    plan = workload["plan"]
    if plan is None:
        return str(workload["reason"])
    steps = [step for step in plan["steps"] if step["state"] == "now"]
    doing = f": {steps[0]['text']}, for {duration(plan['step_for_s'])}" if steps else ""
    return f"plan {plan['number']}, {plan['remedy']}{doing}"


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
