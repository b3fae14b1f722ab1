"""Starts Spark's JVM with a configuration that no command line shows.

PySpark passes its configuration to `spark-submit` as arguments, which every user of the machine can read with `ps`.
This module passes it in a file that only this user can read, and removes the file when the JVM has started. On Linux
the file is in memory, so that a killed process leaves none.

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
    """Start the JVM of this process's next session, unless one runs.

    Raises PySparkRuntimeError if the JVM ends while it starts.
    """
    from pyspark import SparkContext

    with _private_file(as_properties(conf)) as path:
        options = f"--properties-file {shlex.quote(path)} --load-spark-defaults"
        with _arguments(f"{options} {os.environ.get(_ARGUMENTS, 'pyspark-shell')}"):
            SparkContext._ensure_initialized()


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
