"""Maps each fault to an action: retry, dead-letter the transaction, or stop relay. No other module classifies faults.

How often and when a fault is retried is decided in `pipeline.retry_policy`, when a handler is stopped in
`pipeline.failure_limit`.

    RelayError                  stop; one line for a person
        ConfigurationError      exit status 2
            Unreachable         a service that starts retries
        Unrouted
    Drop                        done; raised by users' code
    Fail                        dead-letter the transaction; raised by users' code
    TransientFault              retry
        NotNow                  of relay itself
        RetryLater              raised by users' code
        Undelivered
            DestinationRefused  a sink stops at its position
            Unauthorized        the attempt does not count
                SecretUnavailable
            NotTried            the same, and it says nothing of the destination
            EndpointFailed      of one endpoint among many; the sink goes on
                EndpointDown    the attempt does not count
        StatementTimeout, HandlerTimeout (HandlerOccupied), Braked, QueueMissing
    Rejected                    dead-letter the transaction
        EndpointRejected        of one endpoint among many; does not stop the sink
            EndpointDisabled    the transaction holds no keys
    NotRouted, InvalidEvent, ProcessDied,
    Undecodable, NotReceived, Cancelled, TransactionAborted
                                dead-letter the transaction
    TaskFault                   the fault of a task and its action, sent between processes
    Interrupted                 relay is stopping

`action_for` maps these and the exceptions of drivers and libraries. The module is longer than 400 lines because all
faults, their actions and the texts that are safe in a log belong in one file.
"""

from __future__ import annotations

import errno
import re
import socket
import ssl
import sysconfig
import traceback
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from itertools import dropwhile
from pathlib import Path
from typing import Any

import psycopg
from psycopg.pq.abc import PGresult

from relay.outcomes import Drop as Drop
from relay.outcomes import Fail as Fail
from relay.outcomes import RetryLater as RetryLater
from relay.outcomes import TransientFault as TransientFault


class FaultAction(Enum):
    """What relay does after a fault."""

    RETRY = "retry"
    DEAD_LETTER = "dead_letter"
    STOP = "stop"


class RelayError(Exception):
    """A fault that stops relay, with one line for a person: what is wrong, where, and what to do. Exit status 1."""

    exit_status = 1


class ConfigurationError(RelayError):
    """A fault of usage, configuration or environment, which a retry does not fix. Exit status 2."""

    exit_status = 2


class Unreachable(ConfigurationError):
    """A database cannot be reached now. A command ends with it; a service that is starting retries."""


class Unrouted(RelayError):
    """No route matches an event and `unrouted` is `fail`."""


LONGEST_ASKED_SECONDS = 86_400.0
"""The longest wait that relay accepts from a fault, such as an endpoint's Retry-After: the transaction holds keys."""


class NotNow(TransientFault):
    """A fault of relay's own, which passes by itself. Its message is safe in a log."""


class Undelivered(TransientFault):
    """An endpoint or a broker does not accept the event now. Its message is safe in a log.

    `detail` is not, since it may quote the event; it is stored with the dead letter.
    """

    def __init__(
        self, *reasons: object, after: float | None = None, detail: str | None = None
    ) -> None:
        super().__init__(*reasons, after=after)
        self.detail = detail


class DestinationRefused(Undelivered):
    """The destination refuses every event until a person acts on it: the sink stops at its position.

    One delivery at a time then tests whether it accepts again. Its message is safe in a log.
    """


class Unauthorized(Undelivered):
    """The destination refuses relay's credentials, which may be changing: the attempt does not count."""


class SecretUnavailable(Unauthorized):
    """A secret of the configuration cannot be read now. Its message is safe in a log."""


class NotTried(Undelivered):
    """The sink has not tried to deliver the event, for a reason of its own: no attempt, and no outage."""


class EndpointFailed(Undelivered):
    """One endpoint among those of a sink does not accept the event now: that says nothing of the others."""


class EndpointDown(EndpointFailed):
    """An endpoint counts as down or busy: the attempt does not count. `tried`: whether anything was sent to it."""

    def __init__(
        self, *reasons: object, after: float | None = None, detail: str | None = None, tried: bool
    ) -> None:
        super().__init__(*reasons, after=after, detail=detail)
        self.tried = tried


class EndpointBusy(EndpointDown):
    """An endpoint that works has no turn for the event before `after` seconds."""

    def __init__(self, *reasons: object, after: float) -> None:
        super().__init__(*reasons, after=after, tried=False)


class NoCredentials(psycopg.OperationalError):
    """No connection was tried, since a secret of the configuration cannot be read now."""


class Rejected(Exception):
    """An endpoint or a broker will never accept the event. Its message is safe in a log.

    `detail` is not, since it may quote the event; it is stored with the dead letter.
    """

    def __init__(self, *reasons: object, detail: str | None = None) -> None:
        super().__init__(*reasons)
        self.detail = detail


class EndpointRejected(Rejected):
    """One endpoint among those of a sink will never accept the event, or cannot be used: the others may be fine."""


class EndpointDisabled(EndpointRejected):
    """The endpoint of an event is disabled, by relay or by an operator. Its message is safe in a log."""


class NotRouted(Exception):
    """No route matches an event and `unrouted` is `dead_letter`."""


class Undecodable(Exception):
    """An event has bytes that are invalid in the encoding of its source."""


class InvalidEvent(Exception):
    """An event does not match what `events:` of the configuration declares for its type.

    Its message is safe in a log: it names fields and no values. Its cause is the error of an upcaster. `faults` has the
    path of each field at fault, from `payload` or `metadata`, and what is wrong with it.
    """

    def __init__(self, text: str, faults: Sequence[tuple[tuple[str | int, ...], str]] = ()) -> None:
        super().__init__(text)
        self.faults = faults


class NotReceived(Exception):
    """An event of the transaction is too large to be received. Its message is safe in a log.

    `offsets` are the c_offsets of such events, as far as they are known.
    """

    def __init__(self, text: str, offsets: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.offsets = offsets


class TooLarge(Exception):
    """Rows cannot be read, since a value is too large for the server or for this process."""


class ProcessDied(Exception):
    """`crash_limit` processes died with the transaction in flight."""


class Cancelled(Exception):
    """An operator cancelled a deferred transaction. Its message is safe in a log."""


class TransactionAborted(Exception):
    """A handler suppressed a database error; the database transaction is aborted."""


_FINAL = (
    Fail,
    EndpointDisabled,
    NotRouted,
    ProcessDied,
    InvalidEvent,
    Undecodable,
    NotReceived,
    Cancelled,
)


def transaction_ended(handlers: Sequence[str]) -> ConfigurationError:
    """Return the error for Python handlers of which one ended the database transaction."""
    keys = " or ".join(f"handlers.{name}.callable" for name in handlers)
    return ConfigurationError(
        f"{keys}: the function ended the database transaction (commit, rollback, or it closed the connection or all "
        "cursors): leave that to relay, which commits effects, dead letters and offsets together; run what may be "
        "undone inside `with cursor.connection.transaction():`"
    )


def made_read_only(handlers: Sequence[str]) -> ConfigurationError:
    """Return the error for Python handlers of which one made the database transaction read-only."""
    keys = " or ".join(f"handlers.{name}.callable" for name in handlers)
    return ConfigurationError(
        f"{keys}: the function made the database transaction read-only, in which relay cannot store that the events "
        "are applied: remove `set transaction read only`, and read in a session of your own"
    )


class StatementTimeout(TransientFault):
    """A handler takes longer for a single transaction than `statement_timeout`. Its message is safe in a log."""


class HandlerTimeout(TransientFault):
    """A Python handler takes longer for a single transaction than its `timeout`. Its message is safe in a log."""


class HandlerOccupied(HandlerTimeout):
    """A Python handler is not called, since too many calls of it go on after their `timeout`: no attempt was made."""


class Braked(TransientFault):
    """A handler is stopped because it failed with too many transactions in a row. Its message is safe in a log.

    `fault` is the kind of fault, as `kind_of` returns it; `failed` transactions of the task failed with it.
    `transaction_id`, `hosts` and `exception`, the first line of its fault, describe one of them; `exception` may quote
    the event.
    """

    def __init__(
        self,
        text: str,
        handler: str = "",
        fault: str = "",
        failed: int = 0,
        transaction_id: str | None = None,
        hosts: Sequence[str] = (),
        exception: str | None = None,
    ) -> None:
        super().__init__(text)
        self.handler = handler
        self.fault = fault
        self.failed = failed
        self.transaction_id = transaction_id
        self.hosts = hosts
        self.exception = exception


class QueueMissing(TransientFault):
    """The queue of a handler does not exist: whoever works it may drop it. Its message is safe in a log."""


class Interrupted(Exception):
    """The service is stopping and gives up a wait for a retry."""


TRANSIENT_SQLSTATES = frozenset(
    {
        "25006",  # read-only transaction: a failover is under way
        "25P03",  # idle-in-transaction timeout
        "25P04",  # transaction timeout
        "26000",  # a prepared statement is gone: the connection leads to another session, as poolers do
        "40001",  # serialization failure
        "40003",  # statement completion unknown
        "40P01",  # deadlock
        "55006",  # object in use
        "55P03",  # lock timeout
        "57014",  # statement timeout, or cancelled by an administrator
        "HV00N",  # a foreign server cannot be reached
    }
)
TRANSIENT_CLASSES = (
    "08",  # connection exceptions
    "53",  # insufficient resources, but for a fixed limit
    "57P",  # operator intervention: shutdown, crash, cannot connect now
    "58",  # system error outside PostgreSQL: I/O
    "XX",  # internal error, corrupted data or index
)
_FIXED_LIMIT = "53400"
"""A limit of the configuration, such as `temp_file_limit`: what exceeds it once exceeds it again."""
_MAY_BE_OF_ONE = frozenset(
    {
        "25P03",  # idle-in-transaction timeout: the handler pauses
        "25P04",  # transaction timeout
        "53200",  # out of memory, or of the locks that max_locks_per_transaction allows
        "55P03",  # lock timeout
        "57014",  # statement timeout, or cancelled by an administrator
        "XX000",  # internal error, as extensions raise it
    }
)
"""Transient states that a single transaction may cause whenever it is applied."""
_ENDS_SESSION = frozenset({"25P03", "25P04"})
_RAISED_BY_USERS = "exec_stmt_raise"
"""The server's function that runs RAISE: the SQLSTATE is a choice of whoever wrote the trigger."""


_OUTAGE_ERRNOS = frozenset(
    {
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH),
        *(errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO),
    }
)
"""Errors of the operating system about the network or an exhausted resource."""
_NO_THREAD = "can't start new thread"
"""What Python's RuntimeError says where the system, or a limit of the container, refuses a thread."""
_NAME_RESOLUTION = frozenset({socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_NONAME})
_LOST_CONNECTION = re.compile("connection|consuming input|flushing|resolve host")
"""Matches messages of psycopg and libpq about a connection that is lost or failed; these errors have no SQLSTATE."""
_OUTAGE_NAMES = frozenset(
    {
        *(ConnectionError.__name__, TimeoutError.__name__),
        *("InvalidCachedStatementError", "OutdatedSchemaCacheError"),
    }
)
"""Names of errors that client libraries do not derive from the built-in ones: redis, nats, requests, elasticsearch.

The last two are asyncpg's, of a session whose prepared statements a change of the schema has made stale.
"""
_CHAIN_LENGTH = 10


def action_for(error: BaseException) -> FaultAction:
    """Return the action for a fault.

    Outages are retried: connections, name resolution, locks, resources, timeouts, also if another error wraps them.
    Any other fault is one of the transaction, which is dead-lettered.

    Source: PostgreSQL documentation, appendix A "PostgreSQL Error Codes".
    """
    if isinstance(error, RelayError):
        return FaultAction.STOP
    if isinstance(error, psycopg.Error):
        return _database_action(error)
    # Whatever their causes are: `raise Fail(…) from error` is no outage.
    if isinstance(error, Rejected | Drop) or is_final(error):
        return FaultAction.DEAD_LETTER
    if isinstance(error, TransientFault | MemoryError) or _names_outage(error):
        return FaultAction.RETRY
    if isinstance(error, Exception):
        return FaultAction.DEAD_LETTER
    return FaultAction.STOP


def asked_of(error: BaseException | None) -> float:
    """Return the seconds that a fault asks for before the next attempt, up to `LONGEST_ASKED_SECONDS`; 0 without."""
    asked = _seconds(error.after) if isinstance(error, TransientFault) else 0.0
    # An endpoint may ask for NaN, for which every comparison is false.
    return min(asked, LONGEST_ASKED_SECONDS) if asked > 0 else 0.0


def _seconds(after: Any) -> float:
    """The seconds of a wait, as a sink of a package gives it: also the text of a header. 0 if it is no number."""
    try:
        return after.total_seconds() if isinstance(after, timedelta) else float(after)
    except (TypeError, ValueError, OverflowError):
        return 0.0


def is_final(error: BaseException) -> bool:
    """Return whether a fault dead-letters its transaction also where `retry.on` is `any`: no attempt ends otherwise."""
    return isinstance(error, _FINAL) or _is_loop(error)


def _is_loop(error: BaseException) -> bool:
    """Return whether `relay.publish` has refused an event since its chain of causes is too long."""
    return isinstance(error, psycopg.Error) and error.sqlstate == "RLHOP"


def is_transient(error: BaseException) -> bool:
    """Return whether a fault outside handlers, which no event has caused, may pass by itself."""
    if isinstance(error, psycopg.OperationalError) and error.sqlstate is None:
        return True
    return action_for(error) is FaultAction.RETRY


def _names_outage(error: BaseException, depth: int = 0) -> bool:
    """Return whether an error, or one that it wraps, is about the network, a connection or an exhausted resource."""
    if isinstance(error, psycopg.Error):
        return _database_action(error) is FaultAction.RETRY
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError) or _is_outage_of(error):
        return True
    if any(each.__name__ in _OUTAGE_NAMES for each in type(error).__mro__):
        return True
    if isinstance(error, socket.gaierror):
        return error.errno in _NAME_RESOLUTION
    if isinstance(error, OSError) and error.errno in _OUTAGE_ERRNOS:
        return True
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        return True
    return depth < _CHAIN_LENGTH and any(
        _names_outage(inner, depth + 1) for inner in _wrapped(error)
    )


def _is_outage_of(error: BaseException) -> bool:
    """Return whether another driver of PostgreSQL, such as asyncpg or psycopg2, reports a transient SQLSTATE."""
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return isinstance(state, str) and _is_transient_state(state)


def _is_transient_state(state: str) -> bool:
    if state == _FIXED_LIMIT:
        return False
    return state in TRANSIENT_SQLSTATES or state.startswith(TRANSIENT_CLASSES)


def ends_session(error: BaseException) -> bool:
    """Return whether the session was ended since its transaction took too long: no savepoint is left."""
    if isinstance(error, HandlerTimeout):
        return not isinstance(error, HandlerOccupied)
    return isinstance(error, psycopg.Error) and error.sqlstate in _ENDS_SESSION


def may_be_of_one(error: BaseException) -> bool:
    """Return whether a transient fault of the target may belong to the transaction: it comes again for that one.

    A server that is away, ends, or has no connection or disk left is an outage, whatever it was doing.
    """
    if isinstance(error, StatementTimeout | HandlerTimeout):
        return True
    if not isinstance(error, psycopg.Error) or _database_action(error) is not FaultAction.RETRY:
        return False
    return error.sqlstate in _MAY_BE_OF_ONE or error.diag.source_function == _RAISED_BY_USERS


def _wrapped(error: BaseException) -> list[BaseException]:
    """Return the errors that an error wraps.

    These are its explicit cause, and the `reason` of urllib's URLError and urllib3's MaxRetryError. Its context counts
    only for subclasses of OSError, as requests and smtplib wrap errors in, and if it is a database error, which has
    aborted the transaction; other contexts may be unrelated.
    """
    context = None if error.__suppress_context__ else error.__context__
    if not isinstance(error, OSError) and not isinstance(context, psycopg.Error):
        context = None
    candidates = (getattr(error, "reason", None), error.__cause__, context)
    return [inner for inner in candidates if isinstance(inner, BaseException)]


def _database_action(error: psycopg.Error) -> FaultAction:
    state = error.sqlstate
    if state is None:
        return FaultAction.RETRY if _lost_connection(error) else FaultAction.DEAD_LETTER
    if _permission_denied(error):
        return FaultAction.STOP
    if _is_transient_state(state) or _stale(error):
        return FaultAction.RETRY
    return FaultAction.DEAD_LETTER


_STALE_PLAN = "cached plan must not change result type"
_DRIVERS_STATEMENT = re.compile(r'"_pg3_[0-9a-f]+"')
"""Matches the names that psycopg gives to the statements that it prepares by itself."""


def _stale(error: psycopg.Error) -> bool:
    """Return whether a statement fails because of what the session has prepared, and would not in a new session.

    0A000 is also the SQLSTATE of what PostgreSQL does not support, 42P05 that of a PREPARE which a handler repeats.
    """
    if error.sqlstate == "0A000":
        # The message may be in another language, the name of the function is missing behind some poolers.
        routine, text = error.diag.source_function, str(error)
        return routine == "RevalidateCachedQuery" or text.startswith(_STALE_PLAN)
    return error.sqlstate == "42P05" and _DRIVERS_STATEMENT.search(str(error)) is not None


_CONFLICTS = frozenset({"40001", "40P01", "55006", "55P03", "57014"})
"""Transient faults that another session or a timeout causes, so that a new session does not help."""


def spoils_session(error: BaseException, depth: int = 0) -> bool:
    """Return whether the session of the database that raised `error` is to be closed, so that a retry gets another one.

    A session is closed after every transient fault that may be its own: it is read-only since a failover, leads to a
    standby, a pooler gave its statements to another client, its plans or its caches are stale.
    """
    if isinstance(error, psycopg.Error) and error.sqlstate not in _CONFLICTS:
        return _database_action(error) is FaultAction.RETRY
    return depth < _CHAIN_LENGTH and any(
        spoils_session(inner, depth + 1) for inner in _wrapped(error)
    )


def _lost_connection(error: psycopg.Error) -> bool:
    """Return whether an error without SQLSTATE is one of a connection; misuse of psycopg has none either."""
    # Imported here: a command that prints its help needs no pool.
    from psycopg_pool import PoolClosed, PoolTimeout, TooManyRequests

    if isinstance(error, NoCredentials | PoolTimeout | PoolClosed | TooManyRequests):
        return True
    if not isinstance(error, psycopg.OperationalError):
        return False
    # psycopg sets `pgconn` only on errors of an attempt to connect.
    return error.pgconn is not None or (
        _LOST_CONNECTION.search(str(error)) is not None and "pipeline" not in str(error)
    )


def server_error(result: PGresult) -> psycopg.Error:
    """Return the error of a libpq result, as psycopg raises it.

    An error without SQLSTATE is libpq's own, and means that the connection is lost; psycopg would report it as an error
    of the statement.
    """
    error = psycopg.errors.error_from_result(result, encoding="utf-8")
    if error.sqlstate is not None:
        return error
    return psycopg.OperationalError(str(error).strip() or "the connection is lost")


def exceeds_limits(error: BaseException) -> bool:
    """Return whether a value is too large for the server to send, or for this process or libpq in it to take."""
    if isinstance(error, MemoryError | psycopg.errors.ProgramLimitExceeded):
        return True
    if isinstance(error, psycopg.errors.OutOfMemory):
        return True
    if isinstance(error, psycopg.errors.InternalError_):
        # The server does not translate this text.
        return "invalid memory alloc request size" in str(error)
    # libpq reports it only in the text of the message.
    return (
        isinstance(error, psycopg.OperationalError)
        and not error.sqlstate
        and "memory" in str(error)
    )


def timed_out(error: BaseException) -> bool:
    """Return whether `statement_timeout` cancelled a statement.

    Only the message tells a timeout from a request of the user; a message that is not English counts as a timeout.
    """
    return isinstance(error, psycopg.errors.QueryCanceled) and "user request" not in str(error)


def _permission_denied(error: psycopg.Error) -> bool:
    """Return whether the role lacks a privilege, for any event; the CHECK of a policy has the same SQLSTATE."""
    return error.sqlstate == "42501" and (
        error.diag.source_function in ("aclcheck_error", "InitTempTableNamespace")
        or is_of_row_security(error)
    )


def is_of_row_security(error: psycopg.Error) -> bool:
    """Return whether a query failed since a policy would have hidden rows, in a session with `row_security = off`."""
    return error.sqlstate == "42501" and error.diag.source_function == "check_enable_rls"


_REFUSED_FOR_GOOD = re.compile(
    # 28P01, 28000
    r"authentication failed|auth failed|no password supplied|pg_hba\.conf|is not permitted to log in|"
    # Azure's tokens; poolers
    r"access token has expired|no such (user|database)|"
    # 42501
    r"permission denied for database|"
    # 42501, of a replication connection
    r"start (WAL sender|walsender)|"
    # 28000, 3D000
    r'(role|database) ".*" does not exist|'
    r"certificate|does not support SSL|invalid \S+ value|invalid port number",
)
_LASTING_SQLSTATES = frozenset({"28000", "28P01", "3D000"})


def refused_for_good(error: psycopg.OperationalError) -> bool:
    """Return whether a connection attempt fails until its credentials or its address change, so that no retry helps.

    libpq gives no SQLSTATE for a failed attempt, only the server's message. A message that is not recognised, such as
    one in another language, is retried.
    """
    if isinstance(error, NoCredentials):
        return True
    if error.sqlstate is not None:
        return error.sqlstate in _LASTING_SQLSTATES
    return _REFUSED_FOR_GOOD.search(str(error)) is not None


def first_line(error: BaseException, default: str = "") -> str:
    """Return the first line of an error's message; if it has none, `default` or the name of its class."""
    lines = _message(error).splitlines()
    return _storable(lines[0][:_LONGEST_MESSAGE]) if lines else default or type(error).__name__


def _message(error: BaseException) -> str:
    """Return the message of an error, which may be one of users' code; empty if it has none that can be had."""
    try:
        return str(error).strip()
    except Exception:
        return ""


def describe(error: BaseException) -> str:
    """Return a fault's text for a log: kind and SQLSTATE, and a message only if it cannot quote values.

    For an error of users' code the line of theirs follows: the message of the dead letter may come an hour later.
    """
    if isinstance(error, RelayError | NotNow):
        return str(error)
    name = type(error).__name__
    if isinstance(
        error,
        Undelivered
        | Rejected
        | StatementTimeout
        | HandlerTimeout
        | Braked
        | QueueMissing
        | NotReceived
        | InvalidEvent,
    ):
        text = _storable(" ".join(_message(error)[:_LONGEST_LINE].split()))
        return f"{name}: {text}" if text else name
    if not isinstance(error, psycopg.Error):
        return f"{name}{_raised_in(error)}"
    parts = [name]
    if error.sqlstate:
        parts.append(f"sqlstate {error.sqlstate}")
    if _database_action(error) is FaultAction.RETRY and not (error.sqlstate or "").startswith("XX"):
        # Messages about connections hold hosts and ports, and no values.
        parts.append(first_line(error, "connection lost"))
    elif is_of_row_security(error):
        parts.append(f"{error.diag.message_primary}: give its role the attribute BYPASSRLS")
    elif _permission_denied(error):
        parts.append(f"{error.diag.message_primary}: grant it to the role of target.dsn")
    elif _is_loop(error):
        parts.append(first_line(error))
    elif error.diag.constraint_name:
        parts.append(f"constraint {error.diag.constraint_name}")
    return ": ".join(parts)


def _raised_in(error: BaseException) -> str:
    """Return file and line of a user's code in which an error was raised, or which called what raised it."""
    frames = traceback.StackSummary.extract(
        traceback.walk_tb(error.__traceback__), lookup_lines=False
    )
    of_users = [frame for frame in frames if not frame.filename.startswith(_NOT_USERS)]
    return "".join(f" ({Path(each.filename).name}:{each.lineno})" for each in of_users[-1:])


def kind_of(error: BaseException) -> str:
    """Return the kind of a fault, the same for every event: its class and SQLSTATE."""
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    return f"{type(error).__name__} {state}" if state else type(error).__name__


def exception_text(error: BaseException) -> str:
    """Return a fault's full text for its dead letter, which holds the payload anyway.

    The last frames of the traceback follow, innermost last; for a delivery, its `detail`. A message is cut after
    `_LONGEST_MESSAGE` characters.
    """
    text = _message(error)
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[:_LONGEST_MESSAGE]}… ({len(text):,} characters)"
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    prefix = f"{type(error).__name__} [{state}]" if state else type(error).__name__
    lines = [f"{prefix}: {text}" if text else prefix]
    if isinstance(error, Undelivered | Rejected):
        lines += [str(error.detail)[:_LONGEST_MESSAGE]] if error.detail else []
    elif isinstance(error, InvalidEvent):
        lines += _last_frames(error.__cause__) if error.__cause__ else []
    else:
        lines += _last_frames(error)
    return _storable("\n".join(lines))


def _storable(text: str) -> str:
    """Escape what PostgreSQL's type text cannot hold: NUL, and half of a surrogate pair."""
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()


_LONGEST_LINE = 2_000
"""A sink may quote all of a server's answer, and the line is in each log and row about the fault."""
_LONGEST_MESSAGE = 10_000
"""A message may quote a payload, or all of a server's answer; a text of a gigabyte could not be stored."""
_FRAMES = 5
_RELAY = str(Path(__file__).parent)
_NOT_USERS = (_RELAY, "<", *{sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib")})
"""Where the code of relay, of Python and of installed packages is."""
_DRIVER = str(Path(psycopg.__file__).parent)


def _last_frames(error: BaseException) -> list[str]:
    """Return file, line and function of the frames in which the fault was raised, without values.

    relay's own frames are omitted unless there are no others; so are psycopg's if relay called it.
    """
    frames = traceback.StackSummary.extract(
        traceback.walk_tb(error.__traceback__), lookup_lines=False
    )
    foreign = list(dropwhile(lambda frame: frame.filename.startswith(_RELAY), frames))
    if isinstance(error, psycopg.Error) and all(
        frame.filename.startswith(_DRIVER) for frame in foreign
    ):
        return []
    shown = (foreign or list(frames))[-_FRAMES:]
    return [f"  at {frame.filename}:{frame.lineno} in {frame.name}" for frame in shown]


class TaskFault(Exception):
    """Why a task was not applied, in a form that can be pickled.

    `action` is RETRY or STOP, `status` the exit status of a stop. `died` says that the process that had the task in
    flight may have died of it, `braked` that a handler is stopped, `stalled` why Spark did not get on with it,
    `refused` that a database refuses relay's credentials.
    """

    def __init__(
        self,
        action: FaultAction,
        text: str,
        status: int = 1,
        died: bool = False,
        braked: bool = False,
        stalled: str | None = None,
        refused: bool = False,
    ) -> None:
        super().__init__(action, text, status, died, braked, stalled, refused)
        self.died = died
        self.braked = braked
        self.stalled = stalled
        self.refused = refused
        self.action = action
        self.text = text
        self.status = status

    @classmethod
    def of(cls, error: BaseException) -> TaskFault:
        """Map an error that `apply` raised.

        `apply` dead-letters transactions itself, so any other fault of the data is a defect, and stops relay.
        """
        if is_transient(error):
            refused = isinstance(error, psycopg.OperationalError) and refused_for_good(error)
            return cls(
                FaultAction.RETRY,
                describe(error),
                braked=isinstance(error, Braked),
                refused=refused,
            )
        if isinstance(error, RelayError):
            return cls(FaultAction.STOP, describe(error), error.exit_status)
        lost = _lost_object(error)
        if lost is not None:
            return cls(FaultAction.STOP, f"{lost} does not exist: restore it from a backup")
        status = 2 if isinstance(error, psycopg.Error) and _permission_denied(error) else 1
        return cls(FaultAction.STOP, f"{describe(error)}{_raised_at(error)}", status)

    def as_error(self) -> RelayError:
        """Return the error with which relay ends."""
        return ConfigurationError(self.text) if self.status == 2 else RelayError(self.text)


def _raised_at(error: BaseException) -> str:
    """Return file and line where an error was raised: the parts of a defect that hold no values.

    They are those of relay's innermost frame, or of the innermost one if none is relay's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(_RELAY)]
    shown = (own or frames)[-1:]
    return "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in shown)


def _lost_object(error: BaseException) -> str | None:
    """Return the name of the table or function of relay's schema that PostgreSQL reports as undefined, if it does."""
    if not isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.UndefinedFunction):
        return None
    found = re.search(r"\brelay\.\w+", first_line(error))
    return found.group() if found else None
