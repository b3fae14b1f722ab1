"""Secrets: texts of the configuration that change while relay runs, and are read when they are used.

`{file: PATH}` is read, and the function of `{call: module:function}` called, whenever relay opens a connection. Spark's
executors have neither the driver's files nor its functions: a pickled secret has the text of that moment, and replaces
the one that an executor got before.
"""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, SecretStr

from relay.config import imports
from relay.faults import ConfigurationError, SecretUnavailable, first_line
from relay.runtime.threads import Thread

CALL_SECONDS = 10.0
"""How long a function of `{call: …}` may take."""
KEEP_SECONDS = 60.0
"""How long its text is used where no connection is opened, as for the headers of HTTP requests."""
RENEW_SECONDS = 1.0
"""How old a text has to be before a refusal makes relay call the function again: many may be refused at once."""
_HUNG_SECONDS = 60.0
"""After so long a call that has not returned is given up, and the function called again."""
_LEAST_SHARE = 0.5
"""Which part of its term is left of a text that a client keeps: Kafka's asks again after 80 % of what is left."""
_FILE_BYTES = 1 << 20
_FORMS = "must be a text, {env: NAME}, {file: PATH} or {call: module:function}"


def read_secret_file(path: str) -> str:
    """The text of a file, without leading and trailing white space. Raises ValueError."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(_FILE_BYTES + 1)
        # Some editors begin a file with a byte order mark.
        text = data.decode("utf-8-sig").strip()
    except OSError as error:
        raise ValueError(f"the file {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"the file {path} is not UTF-8 text") from None
    if len(data) > _FILE_BYTES:
        raise ValueError(f"the file {path} has more than {_FILE_BYTES} bytes: it is no secret")
    if "\0" in text:
        raise ValueError(f"the file {path} has a NUL character, which no secret has")
    return text


class Reference(SecretStr):
    """A secret that is elsewhere. `get_secret_value` reads it for a new connection, and raises SecretUnavailable."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(name)
        self.kind, self.name = kind, name

    def get_secret_value(self) -> str:
        """Read the secret. Raises SecretUnavailable."""
        raise NotImplementedError

    def recent(self) -> str:
        """The secret for one of many requests. Raises SecretUnavailable."""
        return self.get_secret_value()

    @property
    def is_at_hand(self) -> bool:
        """Whether `recent` returns at once."""
        return True

    def refused(self, text: str | None) -> None:
        """Note that a destination has refused this text; None: the last one."""

    def mark(self) -> Hashable:
        """A value that changes with the secret, as far as that is known without reading it."""
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and (self.kind, self.name) == (other.kind, other.name)

    def __hash__(self) -> int:
        return hash((self.kind, self.name))

    def __len__(self) -> int:
        return len(self.get_secret_value())

    def __reduce__(self) -> tuple[Any, ...]:
        return receive, (self.kind, self.name, self.recent())


class FileSecret(Reference):
    """The text of a file, read each time, since Kubernetes and others replace it."""

    def __init__(self, path: str) -> None:
        super().__init__("file", path)

    def get_secret_value(self) -> str:
        """Read the file. Raises SecretUnavailable; an empty file is one that is being written."""
        try:
            text = read_secret_file(self.name)
        except ValueError as error:
            raise SecretUnavailable(str(error)) from None
        if not text:
            raise SecretUnavailable(f"the file {self.name} is empty")
        return text

    def mark(self) -> Hashable:
        """The identity of the file that the path leads to, and when it was written."""
        return file_mark(self.name)


def file_mark(path: str | os.PathLike[str]) -> Hashable:
    """What changes when a file is replaced or written, also through a symbolic link; None where it cannot be read."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


class _Kept(NamedTuple):
    """A text that a function has returned, when, and until when it may be used (monotonic clock, seconds)."""

    text: str
    at: float
    until: float

    @property
    def left(self) -> float:
        """For how many seconds more it may be used."""
        return max(0.0, self.until - time.monotonic())


class _Calls:
    """Calls one function, in a thread and once at a time: several connections that are opened at once share a call."""

    def __init__(self, path: str, function: Callable[[], Any]) -> None:
        self._path = path
        self._function = function
        self._lock = Lock()
        self._running: Future[_Kept] | None = None
        self._began = 0.0
        self._kept: _Kept | None = None
        self._last: str | None = None

    def made(self, least_share: float = 0.0) -> _Kept:
        """The text for a new connection, of whose term at least this share is left. Raises SecretUnavailable."""
        with self._lock:
            kept = self._kept
            if kept is not None and kept.left > least_share * (kept.until - kept.at):
                return kept
            hangs = time.monotonic() - self._began > _HUNG_SECONDS
            if self._running is None or hangs:
                self._start()
            running = self._running
        assert running is not None  # noqa: S101
        try:
            return running.result(CALL_SECONDS)
        except Exception as error:
            late = f"has not returned for {CALL_SECONDS:g} s"
            text = self._fault(error) if running.done() else late
            raise SecretUnavailable(f"{{call: {self._path}}} {text}") from None

    def leased(self) -> _Kept:
        """The text for a client that asks for another one before the term ends. Raises SecretUnavailable."""
        try:
            return self.made(_LEAST_SHARE)
        except SecretUnavailable:
            kept = self._kept
            if kept is None or not kept.left:
                raise
            return kept

    def recent(self) -> str:
        """The text of the last call, if that is not long ago. Raises SecretUnavailable."""
        kept = self._kept
        return kept.text if kept is not None and self.is_recent else self.made().text

    @property
    def is_recent(self) -> bool:
        """Whether `recent` calls nothing."""
        kept = self._kept
        if kept is None:
            return False
        has_term = kept.until > kept.at
        return time.monotonic() < (kept.until if has_term else kept.at + KEEP_SECONDS)

    def refused(self, text: str | None) -> None:
        """Forget a text that was refused; None: the last one. One that was just made is as new as the next would be."""
        with self._lock:
            kept = self._kept
            if kept is None or text not in (None, kept.text):
                return
            if time.monotonic() - kept.at >= RENEW_SECONDS:
                self._kept = None

    def _start(self) -> None:
        running: Future[_Kept] = Future()
        self._running, self._began = running, time.monotonic()
        Thread(self._call, name="secret", args=(running,)).start()

    def _call(self, running: Future[_Kept]) -> None:
        try:
            kept = _checked(self._function(), time.monotonic())
        except BaseException as error:
            kept, fault = None, error
        with self._lock:
            if self._running is running:
                self._running = None
                # After a fault the former text is used until its term ends.
                self._kept = kept or self._kept
            if kept is not None:
                self._last = kept.text
        if kept is not None:
            running.set_result(kept)
        else:
            running.set_exception(fault)

    def _fault(self, error: BaseException) -> str:
        if isinstance(error, _NoText):
            return str(error)
        text = first_line(error)
        if self._last is not None:
            text = text.replace(self._last, "…")
        return f"failed: {type(error).__name__}: {text[:_LONGEST_FAULT]}"


_LONGEST_FAULT = 200


class _NoText(Exception):
    """A function has returned what is no secret."""


def _checked(result: Any, now: float) -> _Kept:
    text, seconds = result if isinstance(result, tuple) and len(result) == 2 else (result, 0.0)
    if not isinstance(text, str) or not isinstance(seconds, int | float):
        raise _NoText(
            f"returned {type(result).__name__}: return a text, or (text, seconds for which it may be used)"
        )
    if not text:
        raise _NoText("returned an empty text")
    return _Kept(text, now, now + seconds)


_calls: dict[str, _Calls] = {}


class CallSecret(Reference):
    """The text that a function of the user's returns, such as a token that is valid for minutes."""

    def __init__(self, path: str) -> None:
        """Raises ConfigurationError if the function cannot be imported."""
        super().__init__("call", path)
        if path not in _calls:
            _calls[path] = _Calls(path, imports.load(f"{{call: {path}}}", path))

    def get_secret_value(self) -> str:
        """Call the function, unless its last text may still be used. Raises SecretUnavailable."""
        return _calls[self.name].made().text

    def lease(self) -> tuple[str, float]:
        """The text, and for how many seconds the function lets it be used. Raises SecretUnavailable."""
        kept = _calls[self.name].leased()
        return kept.text, kept.left

    def recent(self) -> str:
        """The text of a call within the last minute. Raises SecretUnavailable."""
        return _calls[self.name].recent()

    @property
    def is_at_hand(self) -> bool:
        """Whether `recent` calls nothing."""
        return _calls[self.name].is_recent

    def refused(self, text: str | None) -> None:
        """Forget a text that was refused: the function is called for the next one."""
        _calls[self.name].refused(text)


_received: dict[tuple[str, str], str] = {}


class _Received(Reference):
    """A secret in an executor: the last text that the driver has sent."""

    def get_secret_value(self) -> str:
        """The text of the last pickle that had this secret."""
        return _received[self.kind, self.name]


def receive(kind: str, name: str, text: str) -> Reference:
    """Unpickle a secret: its text replaces that of an earlier pickle, also in what was unpickled then."""
    _received[kind, name] = text
    return _Received(kind, name)


class _WithoutTexts(pickle.Pickler):
    def reducer_override(self, each: Any) -> Any:
        return (
            (Reference, (each.kind, each.name)) if isinstance(each, Reference) else NotImplemented
        )


def pickled_without(value: Any) -> bytes:
    """A value pickled without the texts of its references: the same bytes whatever these are."""
    pickled = io.BytesIO()
    _WithoutTexts(pickled).dump(value)
    return pickled.getvalue()


def read(key: str, secret: SecretStr) -> str:
    """The text of a secret for a new connection. Raises SecretUnavailable, whose message names the key."""
    try:
        return secret.get_secret_value()
    except SecretUnavailable as error:
        raise SecretUnavailable(f"{key}: {error}") from None


async def read_aside(key: str, secret: SecretStr) -> str:
    """Do what `read` does in an event loop, which goes on while a function of the user's is called."""
    if isinstance(secret, CallSecret):
        return await asyncio.to_thread(read, key, secret)
    return read(key, secret)


def recent(secret: SecretStr) -> str:
    """The text for one of many requests. Raises SecretUnavailable."""
    return secret.recent() if isinstance(secret, Reference) else secret.get_secret_value()


def is_at_hand(secret: SecretStr) -> bool:
    """Whether `recent` returns at once."""
    return not isinstance(secret, Reference) or secret.is_at_hand


def refused(secret: SecretStr, text: str | None = None) -> None:
    """Note that a destination has refused the text of a secret; None: its last one."""
    if isinstance(secret, Reference):
        secret.refused(text)


def marks(secrets: Iterable[SecretStr]) -> Hashable:
    """A value that changes when a file of these secrets is replaced or written."""
    return tuple(each.mark() for each in secrets if isinstance(each, Reference))


def known_text(secret: SecretStr) -> str | None:
    """The text of a secret for checks of the configuration; None where a function has to be called for it."""
    return None if isinstance(secret, CallSecret) else secret.get_secret_value()


def resolve_secret(value: Any) -> Any:
    """The text of a value or of the variable in `{env: NAME}`, or the Reference that it is. Raises ValueError."""
    if not isinstance(value, dict):
        return str(value) if isinstance(value, int | float) else value
    if len(value) != 1 or not isinstance(next(iter(value.values())), str):
        raise ValueError(_FORMS)
    ((kind, name),) = value.items()
    match kind:
        case "env":
            if name not in os.environ:
                raise ValueError(f"the environment has no variable {name}: set it for relay")
            return os.environ[name]
        case "file":
            text = read_secret_file(name)
            if not text:
                raise ValueError(f"the file {name} is empty")
            # A pipe, such as a shell's <(…), can be read only once.
            return FileSecret(name) if Path(name).is_file() else text
        case "call":
            imports.require_path(name)
            try:
                return CallSecret(name)
            except ConfigurationError as error:
                raise ValueError(str(error)) from None
    raise ValueError(_FORMS)


Secret = Annotated[SecretStr, BeforeValidator(resolve_secret)]
"""A secret value: a text, or a `Reference`, which is read when it is used."""
