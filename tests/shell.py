"""Runs the ```sh blocks of the documentation with bash, as they stand there.

bash finds the programs of REAL, PROJECT and CHECKS and no others, so that a block that uses another one fails until it
is added here. Those of CHECKS are not run: they install, build, measure for an hour, or need an engine or a cluster.
Each of their calls is checked against the files that it is about.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import relay
from relay.cli.app import app
from relay.demo.embedded import wheel_binaries
from tests.postgres import VARIABLE
from tests.process import ROOT

RELAY = typer.main.get_command(app)
REAL = ("cat", "curl", "mkdir", "openssl")
PROJECT = ("relay", "python", "psql", "pg_dump", "pg_restore")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
MEASURING = {"bench": "bench.__main__", "bench-before": "bench.before"}
"""The modules of targets that take arguments. They import what the peers of relay need, at a second of CPU."""
IMAGE = "relay"
JAEGER = "jaegertracing/jaeger"

_RELAY = """#!/bin/bash
# Says yes where relay asks; a service ends once it reads the WAL.
[ "$1" = run ] || exec "$PYTHON" -m relay "$@" < <(yes)
"$PYTHON" -m relay "$@" >run.log 2>&1 &
until grep -q 'reading the WAL' run.log; do kill -0 $! || { cat run.log; exit 1; }; sleep 0.1; done
kill $! && wait $!
"""
_PYTHON = '#!/bin/sh\nexec "$PYTHON" "$@"\n'
_PSQL = '#!/bin/sh\nexec "$PYTHON" -m tests.psql "$@"\n'
_RECORDER = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=calls)
"""


def run_block(text: str, folder: Path, **environment: str) -> str:
    """Run a block in a folder until a command fails, and return what it prints.

    Raises AssertionError where a command fails or is not installed, or a call that is only checked is wrong.
    """
    tools = _make_tools(folder / ".bin")
    calls = folder / ".calls"
    calls.unlink(missing_ok=True)
    done = subprocess.run(
        [shutil.which("bash") or "bash", "-c", f"shopt -s expand_aliases\nset -e\n{text}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=folder,
        env={
            **{"PATH": str(tools), "PYTHONPATH": str(ROOT), "PYTHON": sys.executable},
            **{"HOME": str(folder), "CALLS": str(calls), "LANG": "C.UTF-8"},
            **environment,
        },
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{text}\nends with status {done.returncode}:\n{done.stdout}"
    for line in calls.read_text().splitlines() if calls.exists() else []:
        call: list[str] = json.loads(line)
        try:
            CHECKS[call[0]](call[1:])
        except Exception as error:
            raise AssertionError(f"a reader cannot run {shlex.join(call)}: {error!r}") from error
    return done.stdout


def _make_tools(folder: Path) -> Path:
    """Write the programs that a block may use into a folder for PATH."""
    folder.mkdir(exist_ok=True)
    texts = {"relay": _RELAY, "python": _PYTHON, "psql": _PSQL, **dict.fromkeys(CHECKS, _RECORDER)}
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    # The last ones are those of the scripts above.
    for name in (*REAL, "bash", "grep", "sleep", "yes"):
        _link(folder / name, shutil.which(name))
    for name in ("pg_dump", "pg_restore"):
        _link(folder / name, _server_program(name))
    return folder


def _link(link: Path, program: str | None) -> None:
    if program is not None and not link.exists():
        link.symlink_to(program)


def _server_program(name: str) -> str | None:
    """A program of the version of the tests' server."""
    choice = os.environ.get(VARIABLE, "")
    if "/" in choice:
        return shutil.which(name, path=choice)
    return shutil.which(name, path=str(wheel_binaries()))


def needs(*programs: str) -> None:
    """Skip the test where a program of REAL is not installed."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


def parse(words: Sequence[str], command: Any = RELAY) -> dict[str, Any]:
    """Parse the arguments of a call as the command line does; raises what that raises."""
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"relay has no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    values: dict[str, Any] = command.make_parser(typer.Context(command)).parse_args(list(words))[0]
    return values


# Calls that are checked and not made


def _make(words: list[str]) -> None:
    """The target exists, and the benchmark takes its arguments."""
    (target,) = (word for word in words if "=" not in word)
    assert f"\n{target}: " in (ROOT / "Makefile").read_text()
    arguments = next((word.removeprefix("ARGS=") for word in words if "=" in word), "")
    if target not in MEASURING:
        assert arguments == ""
        return
    values = parse(shlex.split(arguments), _command(import_module(MEASURING[target]).main))
    for word in values.get("workloads") or []:
        assert import_module("bench.__main__")._named(word)


def _command(main: Callable[..., Any]) -> Any:
    made = typer.Typer()
    made.command()(main)
    return typer.main.get_command(made)


def _docker(words: list[str]) -> None:
    """relay's image is built from the Dockerfile, and its arguments are relay's."""
    verb, *rest = words
    assert verb in ("build", "run")
    dockerfile = (ROOT / "Dockerfile").read_text()
    if verb == "build":
        assert rest == ["-t", IMAGE, "."]
    elif JAEGER not in rest:
        assert '\nENTRYPOINT ["relay"]\nCMD ["run"]\n' in dockerfile
        at = rest.index(IMAGE)
        parse(rest[at + 1 :] or ["run"])
        (mounted,) = (word for word in rest[:at] if word.endswith(":ro"))
        assert f"RELAY_CONFIG={mounted.split(':')[-2]}\n" in dockerfile


def _compose(words: list[str]) -> None:
    """The service is one of docker-compose.yml, and its arguments are relay's."""
    verb, *rest = (word for word in words if word not in ("-d", "--rm"))
    assert verb in ("up", "run", "exec")
    if verb == "up":
        return
    service, *arguments = rest
    assert COMPOSE["services"][service]["image"] == "${RELAY_IMAGE:-relay}"
    parse(arguments[1:] if verb == "exec" else arguments)


def _kubectl(words: list[str]) -> None:
    """The manifests exist; the secret is the one that they name."""
    manifests = ROOT / "config" / "kubernetes"
    if words[0] == "apply":
        assert words[1:] == ["-f", f"{manifests.relative_to(ROOT)}/"]
        return
    assert words[:3] == ["create", "secret", "generic"]
    assert f"secretKeyRef: {{name: {words[3]}," in (manifests / "relay.yaml").read_text()


def _helm(words: list[str]) -> None:
    """The chart exists, and the call gives it values."""
    verb, _, chart, *options = (word for word in words if word != "--install")
    assert verb in ("install", "upgrade")
    assert (ROOT / chart / "Chart.yaml").exists()
    assert "-f" in options


def _install(words: list[str]) -> None:
    """Of relay: extras that exist, or the wheel of this version. Of another package: one that the tests have, too."""
    assert words[0] == "install" or words[:2] == ["tool", "install"]
    for word in (each for each in words[words.index("install") + 1 :] if each != "--global"):
        package, _, rest = word.partition("[")
        if package.endswith(".whl") or "@" in rest:
            assert f"dist/relay_outbox-{relay.__version__}-py3-none-any.whl" in word
        elif package != PYPROJECT["project"]["name"]:
            assert f'"{package}' in (ROOT / "pyproject.toml").read_text()
            continue
        extras = rest.partition("]")[0].split(",") if rest else []
        assert set(extras) <= set(PYPROJECT["project"]["optional-dependencies"])


def _systemctl(words: list[str]) -> None:
    """The unit is relay's."""
    assert words[:-1] in (["enable", "--now"], ["restart"])
    assert (ROOT / "deploy" / "systemd" / f"{words[-1]}.service").exists()


def _copy(words: list[str]) -> None:
    assert (ROOT / words[-2]).is_file()


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make": _make,
    "docker": _docker,
    "docker-compose": _compose,
    "kubectl": _kubectl,
    "helm": _helm,
    "install": _copy,
    "systemctl": _systemctl,
    "pip": _install,
    "pipx": _install,
    "uv": _install,
}
