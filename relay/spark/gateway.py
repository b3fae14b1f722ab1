"""Starts Spark's JVM with a configuration that no command line shows.

PySpark hands its configuration to `spark-submit` as arguments, which everybody on the machine can read with `ps`. Here
they are in a file that only this user can read, until the JVM has read them. Where the system is Linux the file is in
memory, so that a process that is killed meanwhile leaves no file.

Source: memfd_create(2), proc_pid_fd(5).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from tempfile import NamedTemporaryFile

_ARGUMENTS = "PYSPARK_SUBMIT_ARGS"
_ESCAPES = {
    **{character: "\\" + character for character in "\\=:#! "},
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
}


def start_gateway(conf: Mapping[str, str]) -> None:
    """Start the JVM that the next session of this process will use, unless there is one.

    Raises PySparkRuntimeError if it ends while it starts.
    """
    from pyspark import SparkContext

    with _private_file(as_properties(conf)) as path:
        options = f"--properties-file {shlex.quote(path)} --load-spark-defaults"
        with _arguments(f"{options} {os.environ.get(_ARGUMENTS, 'pyspark-shell')}"):
            SparkContext._ensure_initialized()


@contextmanager
def _private_file(text: str) -> Iterator[str]:
    """The path of a file with a text that only this user can read."""
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
