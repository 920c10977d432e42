"""Every path that a command takes may be relative, begin with ``~``, and hold spaces; it is made absolute when it is
read, so that it means the same in processes and at moments with another working directory.

All options that take text are in one of two tables here, so that a new one is not forgotten."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from torch.distributed import run as torchrun

from resiliency.cli import ckpt, doctor, goodput, heartbeat, host_monitor, inject, pod, supervisor
from resiliency.cli.main import SUBCOMMANDS, main
from resiliency.launch import run
from resiliency.paths import absolute_path

#: By command: the options that are paths, and the other ones that take text.
OPTIONS = {
    "run": (
        "--state-dir --log-dir",
        "--preload --supervisor-set",
    ),
    "host-monitor": (
        "--token-file --state-dir --ca --cert --key --watch-folder --notice-file --xid-source --ecc-source",
        "--supervisor --host --address --block --nproc-per-node --launcher-args --watchdog --metadata-server"
        " --reset-command --cable script",
    ),
    "pod": ("", ""),
    "inject": ("--heartbeats --state-dir --source --folder", "--host --device"),
    "heartbeat": ("directory", ""),
    "doctor": ("--dir --ramdisk --remote --cluster", "--state"),
    "ckpt ls": ("paths", "--run"),
    "ckpt inspect": ("path", "--run"),
    "ckpt verify": ("paths", "--run"),
    "ckpt export": ("path out", "--format --run --key"),
    "ckpt import": ("source --into", "--name --run"),
    "ckpt prune": ("path", "--run"),
    "goodput report": ("more --log --html --prometheus --tensorboard", "--run --since --until --exclude"),
    "goodput compare": ("a b", "--run-a --run-b --since --until --exclude"),
    "goodput watch": ("more --log --prometheus --tensorboard", "--run --since --exclude"),
    "goodput schema": ("", ""),
    "goodput dashboard": ("", ""),
    "supervisor run": ("--file --address-file", "--listen"),
    "supervisor status": ("--token-file --ca --cert --key", "--supervisor"),
    "supervisor events": ("--token-file --ca --cert --key", "--supervisor --workload --host"),
    "supervisor explain": ("--token-file --ca --cert --key", "--supervisor incident"),
    "supervisor drain": ("--token-file --ca --cert --key", "--supervisor --reason host"),
    "supervisor uncordon": ("--token-file --ca --cert --key", "--supervisor host"),
    "supervisor stop": ("--token-file --ca --cert --key", "--supervisor --reason workload"),
    "supervisor start": ("--token-file --ca --cert --key", "--supervisor workload"),
}
PARSERS = {
    "run": run.make_parser,
    "host-monitor": host_monitor._parser,
    "inject": inject._parser,
    "pod": pod._parser,
}
APPS = {"ckpt": ckpt, "goodput": goodput, "supervisor": supervisor, "heartbeat": heartbeat}


def _of_parser(parser: argparse.ArgumentParser) -> Iterator[tuple[str, Callable[[str], Any]]]:
    for action in parser._actions:
        if action.nargs != 0 and action.choices is None and action.type in (None, str, absolute_path):
            convert = str if action.type is None else action.type
            yield next((name for name in action.option_strings if name.startswith("--")), action.dest), convert


def _of_function(function: Any) -> Iterator[tuple[str, Callable[[str], Any]]]:
    for name, hint in get_type_hints(function, include_extras=True).items():
        if name != "return":
            kind, info = get_args(hint)
            if not {bool, int, float} & {kind, *get_args(kind)}:
                words = str(info.default), *(info.param_decls or ())  # Typer takes the first name for a default
                option = next((each for each in words if each.startswith("--")), name)
                yield option, info.parser or str


def _all() -> dict[str, dict[str, Callable[[str], Any]]]:
    """By command, the options that take text, and what each makes of it."""
    found = {name: dict(_of_parser(parser())) for name, parser in PARSERS.items()}
    for name, _ in _of_parser(torchrun.get_args_parser()):  # torch's own differ from version to version
        if name != "--log-dir":
            del found["run"][name]
    for name, module in APPS.items():
        for command in module.app.registered_commands:
            function: Any = command.callback
            words = name if name == "heartbeat" else f"{name} {command.name or function.__name__}"
            found.setdefault(words, dict(_of_function(function)))
    found["doctor"] = dict(_of_function(doctor.doctor))
    assert {name.split()[0] for name in found} == set(SUBCOMMANDS)
    return found


def test_each_option_that_takes_text_is_known_to_be_a_path_or_not() -> None:
    """Fails for a new option, until it stands in the table; and when it is a path, the next test wants it absolute."""
    assert {name: sorted(options) for name, options in _all().items()} == {
        name: sorted(f"{paths} {others}".split()) for name, (paths, others) in OPTIONS.items()
    }


@pytest.mark.parametrize(
    ("command", "option"), [(name, one) for name, (two, _) in OPTIONS.items() for one in two.split()]
)
def test_a_path_is_absolute_once_it_is_read(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "my home"))
    convert = _all()[command][option]
    assert str(convert("a folder/x")) == f"{tmp_path}/a folder/x"
    assert str(convert("~/a folder/x")) == f"{tmp_path}/my home/a folder/x"
    assert str(convert("/a folder/../x")) == "/a folder/../x"


def test_addresses_and_nothing_are_no_paths() -> None:
    assert [absolute_path(text) for text in ("", "gs://bucket/job", "file:///x")] == [
        "",
        "gs://bucket/job",
        "file:///x",
    ]
    assert absolute_path("x", "/etc") == "/etc/x"


def test_a_command_finds_what_a_path_with_a_tilde_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As bash passes it on: it expands ``~/x``, but not ``--option=~/x``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a folder").mkdir()
    settings = tmp_path / "a folder" / "my.yaml"
    settings.write_text("{workload: {name: job, replicas: 1}, insecure_no_authentication: true}")
    with pytest.raises(SystemExit) as ended:
        main(["supervisor", "run", "--check", "--file=~/a folder/my.yaml"])
    assert not ended.value.code and f"{settings} is good" in capsys.readouterr().err
