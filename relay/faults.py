"""What each kind of fault leads to: try again, dead-letter the transaction, or stop. The one place that decides."""

from __future__ import annotations

import re
import traceback
from enum import Enum
from pathlib import Path

import psycopg
from psycopg_pool import PoolTimeout


class Action(Enum):
    """What happens next after a fault."""

    RETRY = "retry"
    DEAD_LETTER = "dead_letter"
    STOP = "stop"


class RelayError(Exception):
    """A fault with one clear line for a person: what is wrong, where, and what to do. Exit status 1."""

    exit_status = 1


class ConfigurationError(RelayError):
    """Bad usage, configuration or surroundings: nothing gets better by trying again. Exit status 2."""

    exit_status = 2


class Unreachable(ConfigurationError):
    """A database cannot be reached now. A command ends with it; a service that starts waits."""


class Unrouted(RelayError):
    """No route matches an event and `unrouted` is `fail`."""


class TransientFault(Exception):
    """Raise it from a handler to say: try again later, this is not the event's fault.

    `after` is in how many seconds, where somebody knows.
    """

    def __init__(self, *reasons: object, after: float | None = None) -> None:
        super().__init__(*reasons)
        self.after = after


class Undelivered(TransientFault):
    """An endpoint or a broker does not take the event now. What it says is safe in a log."""


class Rejected(Exception):
    """An endpoint or a broker will never take the event. What it says is safe in a log."""


class NotRouted(Exception):
    """No route matches an event and `unrouted` is `dead_letter`."""


class ProcessDied(Exception):
    """Every process that had the transaction in hand died of it, so often that it is dead-lettered."""


class Interrupted(Exception):
    """The service was told to stop while it waited to try again."""


TRANSIENT_SQLSTATES = frozenset(
    {
        "25006",  # read-only transaction: a failover is under way
        "25P03",  # idle-in-transaction timeout
        "25P04",  # transaction timeout
        "26000",  # a prepared statement is gone: the connection was changed behind our back
        "40001",  # serialization failure
        "40003",  # statement completion unknown
        "40P01",  # deadlock
        "55006",  # object in use
        "55P03",  # lock timeout
        "57014",  # statement timeout, or cancelled by an administrator
    }
)
TRANSIENT_CLASSES = (
    "08",  # connection exceptions
    "53",  # insufficient resources
    "57P",  # operator intervention: shutdown, crash, cannot connect now
    "58",  # system error outside PostgreSQL: I/O
)


_ABOUT_A_FILE = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
"""What a handler meets that looks for a file by what an event says; other errors of the system pass."""


def action_for(error: BaseException) -> Action:
    """Map a fault to what happens next.

    An outage must never turn good events into dead letters, so whatever speaks of the surroundings (connection, locks,
    resources, time) is tried again, and only what remains is blamed on the transaction.

    Source: PostgreSQL documentation, appendix A "PostgreSQL Error Codes".
    """
    if isinstance(error, RelayError):
        return Action.STOP
    if isinstance(error, psycopg.Error):
        return _database_action(error)
    if isinstance(error, OSError):
        return Action.DEAD_LETTER if isinstance(error, _ABOUT_A_FILE) else Action.RETRY
    if isinstance(error, TransientFault | PoolTimeout | MemoryError):
        return Action.RETRY
    if isinstance(error, Exception):
        return Action.DEAD_LETTER
    return Action.STOP


def _database_action(error: psycopg.Error) -> Action:
    state = error.sqlstate
    if state is None:
        # Without a state the server said nothing: the connection broke, or the client library was misused.
        lost = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        return Action.RETRY if lost else Action.DEAD_LETTER
    if _permission_denied(error):
        return Action.STOP
    if state in TRANSIENT_SQLSTATES or state.startswith(TRANSIENT_CLASSES):
        return Action.RETRY
    return Action.DEAD_LETTER


def _permission_denied(error: psycopg.Error) -> bool:
    """Whether a right is missing, which no event is to blame for; row-level security shares the SQLSTATE."""
    return error.sqlstate == "42501" and error.diag.source_function == "aclcheck_error"


_REFUSED_FOR_GOOD = re.compile(
    # 28P01, 28000
    r"authentication failed|no password supplied|pg_hba\.conf|is not permitted to log in|"
    # 28000, 3D000
    r'(role|database) ".*" does not exist|'
    r"certificate|does not support SSL|invalid \S+ value|invalid port number",
)
_LASTING_SQLSTATES = frozenset({"28000", "28P01", "3D000"})


def refused_for_good(error: psycopg.OperationalError) -> bool:
    """Whether a failed connection attempt needs other credentials or another address, so that waiting is no use.

    libpq tells no SQLSTATE of a failed attempt, only the server's words. What is not recognised, such as the words of a
    server that speaks another language, is waited for.
    """
    if error.sqlstate is not None:
        return error.sqlstate in _LASTING_SQLSTATES
    return _REFUSED_FOR_GOOD.search(str(error)) is not None


def describe(error: BaseException) -> str:
    """The fault in words that are safe in a log: kind and SQLSTATE, but no message, since messages quote values."""
    if isinstance(error, RelayError):
        return str(error)
    name = type(error).__name__
    if isinstance(error, Undelivered | Rejected):
        return f"{name}: {error}"
    if not isinstance(error, psycopg.Error):
        return name
    parts = [name]
    if error.sqlstate:
        parts.append(f"sqlstate {error.sqlstate}")
    if _database_action(error) is Action.RETRY:
        # The server's or libpq's own words about itself; they name hosts and ports, never rows.
        parts.append(
            str(error).strip().splitlines()[0] if str(error).strip() else "connection lost"
        )
    elif _permission_denied(error):
        parts.append(f"{error.diag.message_primary}: grant it to the role of target.dsn")
    elif error.diag.constraint_name:
        parts.append(f"constraint {error.diag.constraint_name}")
    return ": ".join(parts)


def exception_text(error: BaseException) -> str:
    """The fault in full, for the dead letter that keeps the payload anyway."""
    text = str(error).strip()
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    prefix = f"{type(error).__name__} [{state}]" if state else type(error).__name__
    whole = f"{prefix}: {text}" if text else prefix
    # PostgreSQL's text type cannot hold NUL, nor half of a surrogate pair.
    return whole.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()


class TaskFault(Exception):
    """Why a task could not be applied, in a form that travels between processes.

    `action` is what to do about it: RETRY, or STOP. `status` is the exit status that a stop leads to. `died` says that
    the process that had the task in hand may have died of it.
    """

    def __init__(self, action: Action, text: str, status: int = 1, died: bool = False) -> None:
        super().__init__(action, text, status, died)
        self.died = died
        self.action = action
        self.text = text
        self.status = status

    @classmethod
    def of(cls, error: BaseException) -> TaskFault:
        """Judge what `apply` raised. It dead-letters by itself, so what still blames the data is a defect: stop."""
        action = action_for(error)
        if action is Action.RETRY:
            return cls(action, describe(error))
        if isinstance(error, RelayError):
            return cls(Action.STOP, describe(error), error.exit_status)
        return cls(Action.STOP, f"{describe(error)}{_place(error)}")

    def as_error(self) -> RelayError:
        """What a fault that stops relay ends it with."""
        return ConfigurationError(self.text) if self.status == 2 else RelayError(self.text)


def _place(error: BaseException) -> str:
    """Where it was raised: all that can be told of a defect without telling values."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
