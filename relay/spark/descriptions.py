"""Descriptions of errors of Spark and of users' functions that are safe to log.

Spark's messages quote values that it cannot convert, and Python's quote a function's arguments: both may hold payloads.
Of the messages of file systems, object stores and catalogs only known words are shown.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import psycopg

from relay.faults import RelayError, describe, first_line

_LINE_LENGTH = 300
_CAUSES = 3
"""How many causes of a Java error are named, at most."""
_LOST = re.compile(
    r"(\([\w.]+\) )?Job aborted due to stage failure: [\w .,:]+ \(TID \d+\) \([^()\n]*\): "
    r"(?P<why>ExecutorLostFailure .*)"
)
"""Spark's message about a job whose executors have ended: it holds no values."""
_IN_WORKER = re.compile(
    r"Traceback \(most recent call last\):\n(?P<frames>(?: .*\n)+)(?P<line>(?P<kind>[\w.]+).*)"
)
_FRAME = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)
_RELAY = str(Path(__file__).parents[1])
_LIBRARIES = ("/pyspark/", "/py4j/", "/pyspark.zip/")
_STORES = frozenset({"deltalake", "_internal", "pyiceberg", "sqlalchemy", "botocore"})
"""The packages whose errors are of a table's store or catalog; `_internal` is deltalake's."""
_JAVA_STORES = (
    *("java.io.", "java.net.", "java.nio.", "org.apache.hadoop.", "software.amazon."),
    "java.lang.ClassNotFoundException",
)
_CODE = re.compile(r"<Code>([A-Za-z]{1,50})</Code>|AWS Error ([A-Z_]{1,50})")
_JAR = re.compile(r'Class [\w.$]+ not found|No FileSystem for scheme "?[\w+.-]+"?')
"""What Hadoop says where the jar of a store is missing."""
_STATUS = re.compile(r"\bstatus(?: code)?:? ([345]\d\d)\b")
_KNOWN_WORDS = (
    *map(
        os.strerror,
        (
            *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO, errno.EMFILE),
            *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT),
            *(errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH),
            errno.ETIMEDOUT,
        ),
    ),
    *("Name or service not known", "failed to lookup address", "error sending request"),
    *("operation timed out", "certificate", "incorrectly configured region"),
    "unable to open database file",
)
"""What stores say that holds no value."""
_DATA_EXCEPTION, _RAISED, _OF_PYTHON = "22", "P0001", "38000"
"""SQLSTATEs of Spark: the class of data exceptions, `raise_error`, and an exception of a Python worker."""
_OF_VALUES = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError)
_UNREADABLE_FILE = "FAILED_READ_FILE"
"""The error condition of a file that Spark cannot read."""
_METADATA_SERVICE = "169.254.169.254"
"""Where libraries ask a cloud's machine for credentials when none are configured."""


def safe_description(error: BaseException, quoted: bool = True) -> str:
    """The error's kind, Spark's error condition and SQLSTATE: a text without values of events.

    With `quoted`, it has the first line of an AnalysisException too, which names columns, tables and locations in the
    query. Pass False where a user's function built the query: it may contain values.
    """
    if isinstance(error, RelayError | psycopg.Error):
        return describe(error)
    from pyspark.errors import AnalysisException, PySparkException

    if quoted and isinstance(error, AnalysisException):
        return f"{type(error).__name__}: {first_line(error)[:_LINE_LENGTH].rstrip(';')}"
    thrown = getattr(error, "java_exception", None)
    if thrown is not None:
        return _java_error(thrown) or type(error).__name__
    if isinstance(error, PySparkException):
        return _spark_error(error)
    text = describe(error)
    reason = ""
    if _is_of_store(type(error)):
        # A class of a user may have a text that cannot be had.
        with suppress(Exception):
            reason = _reason(str(error))
    return f"{text}: {reason}" if reason else text


def is_of_row(error: BaseException) -> bool:
    """Whether Spark, or a function that it calls, has refused what a row has, as a cast does; an outage never does."""
    found = ""
    thrown: Any = getattr(error, "java_exception", error)
    with suppress(Exception):
        found = str(thrown.getSqlState())
    if found != _OF_PYTHON:
        return found[:2] == _DATA_EXCEPTION or found == _RAISED
    match = _IN_WORKER.search(str(error))
    kind = getattr(builtins, match["kind"].rstrip("."), None) if match else None
    return isinstance(kind, type) and issubclass(kind, _OF_VALUES)


def row_description(error: BaseException, quoted: bool = True) -> str:
    """The same of what a row was refused with; with `quoted` also the part of the query that has failed."""
    parts = [safe_description(error, quoted)]
    if quoted:
        with suppress(Exception):
            parts += [f"in {each.fragment()}" for each in error.getQueryContext()[:1]]  # type: ignore[attr-defined]
    return ": ".join(parts)


def _is_of_store(kind: type[BaseException]) -> bool:
    return issubclass(kind, OSError) or any(
        each.__module__.partition(".")[0] in _STORES for each in kind.__mro__
    )


def _reason(text: str) -> str:
    """What the message of a store or a file system says in known words, without addresses and values; "" if nothing."""
    found = [f"HTTP {status}" for status in _STATUS.findall(text)]
    found += [code or other for code, other in _CODE.findall(text)]
    found += _JAR.findall(text)
    if _METADATA_SERVICE in text:
        found.append("no credentials in `options`, and none from the machine's metadata service")
    lowered = text.lower()
    found += [words for words in _KNOWN_WORDS if words.lower() in lowered]
    return ", ".join(dict.fromkeys(found))


@contextmanager
def of_function(key: str) -> Iterator[None]:
    """Turn what a user's function raises in this context into a RelayError with its kind, file and line."""
    try:
        yield
    except RelayError:
        raise
    except Exception as error:
        text = safe_description(error, quoted=False)
        # Of an error that is not Spark's, the text names the line.
        is_located = text == describe(error) or _is_of_store(type(error))
        where = "" if is_located else _where(error)
        raise RelayError(f"{key}: {text}{where}") from error


def _spark_error(error: Any) -> str:
    text = ""
    with suppress(Exception):
        text = str(error)
    lost = _LOST.match(text)
    parts = [type(error).__name__, *_condition(error)]
    return ": ".join([*parts, lost["why"][:_LINE_LENGTH]] if lost else [*parts, *_in_worker(text)])


def _java_error(thrown: Any) -> str:
    """The class of a Java error, its condition and its causes' classes; "" where the JVM has ended."""
    parts: list[str] = []
    with suppress(Exception):
        text = str(thrown.getMessage())
        parts = _java_parts(thrown)
        lost = _LOST.match(text)
        if lost:
            return f"{parts[0]}: {lost['why'][:_LINE_LENGTH]}"
        causes: list[str] = []
        cause = thrown.getCause()
        while cause is not None and len(causes) < _CAUSES:
            causes.append(": ".join(_java_parts(cause)))
            cause = cause.getCause()
        parts += [f"caused by {each}" for each in dict.fromkeys(causes)] or _in_worker(text)
    return ": ".join(parts)


def _java_parts(thrown: Any) -> list[str]:
    """The class of a Java error, its condition, and the reason where it is one of a store."""
    name = str(thrown.getClass().getName())
    reason = _reason(str(thrown.getMessage())) if name.startswith(_JAVA_STORES) else ""
    return [name.rpartition(".")[2], *_condition(thrown), *([reason] if reason else [])]


def _condition(error: Any) -> list[str]:
    """Spark's error condition, SQLSTATE and the file that it could not read, where the error has them."""
    parts: list[str] = []
    # Exceptions of Java itself lack these methods.
    with suppress(Exception):
        parts += [str(each) for each in [error.getCondition()] if each]
        parts += [f"sqlstate {each}" for each in [error.getSqlState()] if each]
        if parts[0].startswith(_UNREADABLE_FILE):
            # Not its folders, which may be values of partitions.
            parts.append(PurePosixPath(str(error.getMessageParameters().get("path"))).name)
    return parts


def _in_worker(text: str) -> list[str]:
    """The kind and the location of a Python worker's error, from the traceback in Spark's message."""
    match = _IN_WORKER.search(text)
    if not match:
        return []
    kind = match["kind"].rstrip(".")
    if kind.startswith(("relay.faults.", "relay.outcomes.")):
        return [match["line"][:_LINE_LENGTH]]
    frames = _FRAME.findall(match["frames"])
    located = f"{kind} ({frames[-1][0]}:{frames[-1][1]})" if frames else kind
    builtin = getattr(builtins, kind, None)
    is_of_store = (
        _is_of_store(builtin)
        if isinstance(builtin, type) and issubclass(builtin, BaseException)
        else kind.partition(".")[0] in _STORES
    )
    reason = _reason(match["line"]) if is_of_store else ""
    return [located, *([reason] if reason else [])]


def _where(error: BaseException) -> str:
    """The file and line of the innermost frame outside relay and Spark."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_RELAY)
        and not any(part in frame.filename for part in _LIBRARIES)
    ]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
