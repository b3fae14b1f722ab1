"""What each kind of fault leads to, and what of it may be told."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import pickle
import smtplib
import socket
import ssl
import sys
import urllib.error
from email.message import Message
from typing import Any

import psycopg
import pytest
from psycopg.types.datetime import TimestamptzLoader
from psycopg_pool import PoolClosed, PoolTimeout, TooManyRequests

import relay
from relay.admin import connections
from relay.config.imports import as_exception
from relay.faults import (
    ConfigurationError,
    FaultAction,
    Interrupted,
    NotNow,
    NotRouted,
    Rejected,
    RelayError,
    TaskFault,
    TransientFault,
    Unrouted,
    action_for,
    describe,
    exception_text,
    is_transient,
    refused_for_good,
)
from relay.runtime.parts import Condition, Recurring
from relay.spark.session import kind_and_first_line

SECRET = "4111-1111"


def database_error(sqlstate: str, message: str = "") -> psycopg.Error:
    """What psycopg raises for a SQLSTATE, known to it or not."""
    try:
        kind = psycopg.errors.lookup(sqlstate)
    except KeyError:
        kind = type("Unknown", (psycopg.DatabaseError,), {"sqlstate": sqlstate})
    return kind(message)


# Every code of the classes that speak of the surroundings, and the single ones.
TRANSIENT = [
    *["08000", "08001", "08003", "08004", "08006", "08007", "08P01"],
    *["25006", "25P03", "25P04"],
    *["40001", "40003", "40P01"],
    *["53000", "53100", "53200", "53300"],
    *["55006", "55P03"],
    *["57014", "57P01", "57P02", "57P03", "57P05"],
    *["58000", "58030", "58P01"],
    *["HV00N", "XX000", "XX001", "XX002"],
]
# Data, constraints, statements and what a handler raises by itself.
OF_THE_EVENT = [
    *["22001", "22003", "22007", "22012", "22021", "22P02", "22P05"],
    *["23502", "23503", "23505", "23514", "23P01"],
    *["42601", "42703", "42804", "42P01"],
    *["21000", "25P02", "38000", "44000", "53400", "54000", "55000", "P0001", "P0002", "HV000"],
]


@pytest.mark.parametrize("sqlstate", TRANSIENT)
def test_a_fault_of_the_surroundings_is_tried_again(sqlstate: str) -> None:
    assert action_for(database_error(sqlstate)) is FaultAction.RETRY


@pytest.mark.parametrize("sqlstate", OF_THE_EVENT)
def test_a_fault_of_the_event_goes_to_the_dead_letters(sqlstate: str) -> None:
    assert action_for(database_error(sqlstate)) is FaultAction.DEAD_LETTER


class SdkError(Exception):
    """What a library of a handler raises around the cause."""


@pytest.mark.parametrize(
    ("error", "action"),
    [
        # The connection broke, or there was none.
        (psycopg.OperationalError("server closed the connection unexpectedly"), FaultAction.RETRY),
        (psycopg.OperationalError("consuming input failed: SSL SYSCALL error"), FaultAction.RETRY),
        (PoolTimeout("couldn't get a connection after 5.00 sec"), FaultAction.RETRY),
        (PoolClosed("the pool 'x' is closed"), FaultAction.RETRY),
        (TooManyRequests(), FaultAction.RETRY),
        (ConnectionRefusedError(), FaultAction.RETRY),
        (ConnectionResetError(), FaultAction.RETRY),
        (BrokenPipeError(), FaultAction.RETRY),
        (TimeoutError(), FaultAction.RETRY),
        (socket.timeout(), FaultAction.RETRY),  # noqa: UP041
        (socket.gaierror(socket.EAI_AGAIN, "try again"), FaultAction.RETRY),
        (ssl.SSLEOFError(), FaultAction.RETRY),
        # Resources.
        (MemoryError(), FaultAction.RETRY),
        (OSError(errno.ENOSPC, "no space left on device"), FaultAction.RETRY),
        (OSError(errno.EMFILE, "too many open files"), FaultAction.RETRY),
        (RuntimeError("can't start new thread"), FaultAction.RETRY),
        (RuntimeError("the reactor is hot"), FaultAction.DEAD_LETTER),
        (
            OSError(errno.EIO, "the spool file of a large transaction was truncated"),
            FaultAction.RETRY,
        ),
        (OSError(errno.EHOSTUNREACH, "no route to host"), FaultAction.RETRY),
        # An error that wraps one of these.
        (urllib.error.URLError(ConnectionRefusedError()), FaultAction.RETRY),
        (urllib.error.URLError(socket.gaierror(socket.EAI_NONAME, "unknown")), FaultAction.RETRY),
        # A library of its own names.
        (type("ConnectionError", (SdkError,), {})("refused"), FaultAction.RETRY),
        (type("ReadFailed", (type("TimeoutError", (SdkError,), {}),), {})(), FaultAction.RETRY),
        # A handler that says so.
        (TransientFault("later"), FaultAction.RETRY),
        # The event, or what the handler makes of it.
        (ValueError("bad"), FaultAction.DEAD_LETTER),
        (OSError("bad"), FaultAction.DEAD_LETTER),
        (FileNotFoundError(errno.ENOENT, "no such file"), FaultAction.DEAD_LETTER),
        (gzip.BadGzipFile("not a gzipped file"), FaultAction.DEAD_LETTER),
        (smtplib.SMTPDataError(550, b"no such user"), FaultAction.DEAD_LETTER),
        (
            urllib.error.HTTPError("http://x", 404, "Not Found", Message(), None),
            FaultAction.DEAD_LETTER,
        ),
        (urllib.error.URLError("unknown url type: ftq"), FaultAction.DEAD_LETTER),
        (socket.gaierror(socket.EAI_SERVICE, "not supported"), FaultAction.DEAD_LETTER),
        (psycopg.InterfaceError("the cursor is closed"), FaultAction.DEAD_LETTER),
        (
            psycopg.OperationalError("another command is already in progress"),
            FaultAction.DEAD_LETTER,
        ),
        (psycopg.errors.PipelineAborted("pipeline aborted"), FaultAction.DEAD_LETTER),
        (KeyError("amount"), FaultAction.DEAD_LETTER),
        (RecursionError(), FaultAction.DEAD_LETTER),
        (
            UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"),
            FaultAction.DEAD_LETTER,
        ),
        (NotRouted("no route"), FaultAction.DEAD_LETTER),
        (psycopg.DataError("PostgreSQL text fields cannot contain NUL"), FaultAction.DEAD_LETTER),
        (psycopg.ProgrammingError("cannot adapt type 'object'"), FaultAction.DEAD_LETTER),
        # Nothing gets better by trying again, and no event is to blame.
        (RelayError("stop"), FaultAction.STOP),
        (ConfigurationError("stop"), FaultAction.STOP),
        (Unrouted("stop"), FaultAction.STOP),
        (KeyboardInterrupt(), FaultAction.STOP),
        (SystemExit(), FaultAction.STOP),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_what_each_exception_leads_to(error: BaseException, action: FaultAction) -> None:
    assert action_for(error) is action


class SdkOsError(OSError):
    """As of requests and smtplib, whose errors are subclasses of OSError."""


@pytest.mark.parametrize(
    ("wrapper", "explicit", "action"),
    [
        (SdkError, True, FaultAction.RETRY),
        (SdkOsError, True, FaultAction.RETRY),
        (SdkOsError, False, FaultAction.RETRY),
        # It may have been raised by what the handler did instead.
        (SdkError, False, FaultAction.DEAD_LETTER),
        (Rejected, True, FaultAction.DEAD_LETTER),
    ],
)
def test_an_error_that_wraps_an_outage_names_it(
    wrapper: type[Exception], explicit: bool, action: FaultAction
) -> None:
    refused = ConnectionRefusedError()
    assert action_for(wrapped(wrapper, refused, explicit)) is action
    twice = wrapped(SdkError, wrapped(wrapper, refused, explicit), True)
    assert wrapper is Rejected or action_for(twice) is action


def test_a_database_error_has_aborted_the_transaction_whatever_was_raised_meanwhile() -> None:
    deadlock = database_error("40P01", "deadlock detected")
    assert action_for(wrapped(SdkError, deadlock, False)) is FaultAction.RETRY
    assert action_for(wrapped(SdkError, database_error("23505"), False)) is FaultAction.DEAD_LETTER


def test_from_none_says_that_the_cause_does_not_count() -> None:
    def raised() -> BaseException:
        try:
            try:
                raise ConnectionRefusedError
            except OSError:
                raise SdkOsError from None
        except SdkOsError as error:
            return error

    assert action_for(raised()) is FaultAction.DEAD_LETTER


def test_errors_that_wrap_each_other_end() -> None:
    one, other = SdkError(), SdkError()
    one.__cause__, other.__cause__ = other, one
    assert action_for(one) is FaultAction.DEAD_LETTER


def wrapped(wrapper: type[Exception], inner: BaseException, explicit: bool) -> BaseException:
    """What a library raises while it handles an error."""
    try:
        try:
            raise inner
        except BaseException as error:
            if explicit:
                raise wrapper from error
            raise wrapper  # noqa: B904
    except wrapper as error:
        return error


def test_relay_s_own_work_is_retried_whenever_a_connection_may_be_to_blame() -> None:
    error = psycopg.OperationalError("the server ended the stream")
    assert is_transient(error)
    assert TaskFault.of(error).action is FaultAction.RETRY
    assert not is_transient(psycopg.InterfaceError("the cursor is closed"))


# What is told in a log.


@pytest.mark.parametrize("sqlstate", OF_THE_EVENT)
def test_the_description_of_an_event_s_fault_says_its_kind_and_no_value(sqlstate: str) -> None:
    error = database_error(sqlstate, f'duplicate key "{SECRET}"\nDETAIL: ({SECRET})')
    output = describe(error)
    assert SECRET not in output
    assert sqlstate in output
    assert type(error).__name__ in output
    assert "\n" not in output


@pytest.mark.parametrize(
    "error",
    [
        ValueError(SECRET),
        KeyError(SECRET),
        TransientFault(SECRET),
        psycopg.DataError(f"timestamp too large (after year 10K): '{SECRET}'"),
        psycopg.ProgrammingError(f"can't parse {SECRET}"),
        psycopg.NotSupportedError(SECRET),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_description_of_any_other_fault_is_its_kind(error: Exception) -> None:
    assert describe(error) == type(error).__name__


def test_what_a_handler_raises_keeps_its_public_name() -> None:
    error = relay.RetryLater("not enough in stock", after=2)
    assert describe(error) == "RetryLater"
    assert exception_text(error) == "RetryLater: not enough in stock"
    assert action_for(error) is FaultAction.RETRY


def test_a_value_that_psycopg_cannot_read_is_not_shown() -> None:
    loader = TimestamptzLoader(1184)
    with pytest.raises(psycopg.DataError) as raised:
        loader.load(b"12026-01-01 00:00:00+00")
    assert "12026" in str(raised.value)
    assert "12026" not in describe(raised.value)


def test_a_fault_of_the_environment_is_reported_in_the_server_s_words_on_one_line() -> None:
    lost = psycopg.OperationalError("connection to server at 127.0.0.1 failed\nIs it running?\n")
    assert describe(lost) == "OperationalError: connection to server at 127.0.0.1 failed"
    deadlock = database_error("40P01", "deadlock detected\nDETAIL: Process 1 waits")
    assert describe(deadlock) == "DeadlockDetected: sqlstate 40P01: deadlock detected"
    assert describe(psycopg.OperationalError(SECRET)) == "OperationalError"
    assert (
        describe(database_error("XX000", f"invalid {SECRET}")) == "InternalError_: sqlstate XX000"
    )


def test_relay_s_own_faults_are_shown_as_they_are() -> None:
    assert describe(ConfigurationError("source.slot: gone")) == "source.slot: gone"


# What is kept with the payload.


def test_the_dead_letter_keeps_the_whole_exception() -> None:
    assert exception_text(ValueError(f"bad {SECRET}")) == f"ValueError: bad {SECRET}"
    assert exception_text(ValueError()) == "ValueError"
    text = exception_text(database_error("23505", "duplicate key\nDETAIL: (1)"))
    assert text == "UniqueViolation [23505]: duplicate key\nDETAIL: (1)"


def raised(error: Exception, function: str, file: str = "/srv/shop/handlers.py") -> Exception:
    """The error as a handler's function raises it."""
    code = compile(f"def {function}(secret):\n    raise secret", file, "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    try:
        names[function](error)
    except Exception as caught:
        return caught
    raise AssertionError


def test_the_dead_letter_keeps_the_last_frames_without_values() -> None:
    text = exception_text(raised(ValueError("bad"), "handle"))
    first, *frames = text.splitlines()
    assert first == "ValueError: bad"
    assert frames[-1] == "  at /srv/shop/handlers.py:2 in handle"
    assert not any("secret" in frame for frame in frames)


def test_relay_s_own_frames_are_shown_only_where_there_are_no_others() -> None:
    own = raised(ValueError("bad"), "apply", f"{relay.__path__[0]}/handlers/x.py")
    own.__traceback__ = own.__traceback__ and own.__traceback__.tb_next
    assert exception_text(own).splitlines()[1:] == [
        f"  at {relay.__path__[0]}/handlers/x.py:2 in apply"
    ]
    driver = raised(database_error("23505", "twice"), "execute", psycopg.__path__[0] + "/cursor.py")
    driver.__traceback__ = driver.__traceback__ and driver.__traceback__.tb_next
    assert exception_text(driver) == "UniqueViolation [23505]: twice"


def test_a_delivery_is_shown_in_full_only_with_the_payload() -> None:
    error = Rejected("HTTP 422", detail=f"POST https://shop.example/: 422\n{SECRET}")
    assert SECRET not in describe(error)
    assert exception_text(error) == f"Rejected: HTTP 422\nPOST https://shop.example/: 422\n{SECRET}"


@pytest.mark.parametrize("text", ["a\x00b", chr(0xDCFF), chr(0xD800), "Zoë", "😀"])
def test_the_text_of_an_exception_fits_into_postgresql(text: str) -> None:
    """A payload may hold what is no text: a NUL, half a surrogate pair. The exception often quotes it."""
    kept = exception_text(ValueError(text))
    assert "\x00" not in kept
    assert kept.encode().startswith(b"ValueError: ")


# Between processes.


@pytest.mark.parametrize(
    ("error", "action", "text", "status"),
    [
        (database_error("40001", "busy"), FaultAction.RETRY, "sqlstate 40001", 1),
        (ConnectionRefusedError(), FaultAction.RETRY, "ConnectionRefusedError", 1),
        (ConfigurationError("no offsets"), FaultAction.STOP, "no offsets", 2),
        (Unrouted("no route"), FaultAction.STOP, "no route", 1),
        (IndexError(SECRET), FaultAction.STOP, "IndexError", 1),
    ],
)
def test_the_fault_of_a_task_is_judged_once_and_travels(
    error: Exception, action: FaultAction, text: str, status: int
) -> None:
    fault = TaskFault.of(error)
    again = pickle.loads(pickle.dumps(fault))
    for each in (fault, again):
        assert isinstance(each, TaskFault)
        assert (each.action, each.status) == (action, status)
        assert text in each.text
        assert SECRET not in each.text


@pytest.mark.parametrize(
    ("sqlstate", "message", "name"),
    [
        ("42P01", 'relation "relay.deferred" does not exist\nLINE 1: ' + SECRET, "relay.deferred"),
        ("42883", "function relay.is_held(regclass) does not exist", "relay.is_held"),
    ],
)
def test_a_lost_object_of_relay_is_named(sqlstate: str, message: str, name: str) -> None:
    fault = TaskFault.of(database_error(sqlstate, message))
    assert fault.action is FaultAction.STOP
    assert fault.text == f"{name} does not exist: restore it from a backup"


def test_a_defect_names_relay_s_line_and_not_the_driver_s() -> None:
    def execute() -> None:
        raise raised(database_error("42P01", SECRET), "run", psycopg.__path__[0] + "/cursor.py")

    own = compile("def apply(call):\n    call()", f"{relay.__path__[0]}/store/x.py", "exec")
    names: dict[str, Any] = {}
    exec(own, names)
    with pytest.raises(psycopg.Error) as caught:
        names["apply"](execute)
    assert TaskFault.of(caught.value).text == "UndefinedTable: sqlstate 42P01 (x.py:2)"


def test_an_interruption_is_neither_retried_nor_an_event_s_fault() -> None:
    assert TaskFault.of(Interrupted()).action is FaultAction.STOP


@pytest.mark.parametrize(
    ("words", "for_good"),
    [
        ('FATAL:  password authentication failed for user "relay"', True),
        ('FATAL:  Peer authentication failed for user "relay"', True),
        ("fe_sendauth: no password supplied", True),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "relay"', True),
        ('FATAL:  role "relay" does not exist', True),
        ('FATAL:  role "relay" is not permitted to log in', True),
        ('FATAL:  database "app" does not exist', True),
        ("SSL error: certificate verify failed", True),
        ("FATAL:  permission denied to start WAL sender", True),
        ("FATAL:  must be superuser or replication role to start walsender", True),
        ("Connection refused\n\tIs the server running on that host?", False),
        ('could not translate host name "db" to address: Name or service not known', False),
        ("FATAL:  the database system is starting up", False),
        ("FATAL:  sorry, too many clients already", False),
        ("connection timeout expired", False),
        ("FATAL:  Passwort-Authentifizierung fehlgeschlagen", False),
    ],
)
def test_only_what_another_configuration_mends_ends_a_start(words: str, for_good: bool) -> None:
    text = f'connection failed: connection to server at "127.0.0.1", port 5432 failed: {words}'
    assert refused_for_good(psycopg.OperationalError(text)) is for_good


@pytest.mark.parametrize(
    ("error", "output"),
    [
        (ValueError("no\n\tat java.lang"), "ValueError: no"),
        (ValueError(), "ValueError"),
        (ValueError(" \n"), "ValueError"),
        (ValueError("x" * 400), f"ValueError: {'x' * 300}"),
    ],
)
def test_an_error_without_a_message_is_reported_by_its_kind_once(
    error: Exception, output: str
) -> None:
    assert kind_and_first_line(error) == output


@pytest.mark.parametrize(
    ("refusal", "hint"),
    [
        ('connection failed: FATAL:  role "x" does not exist', ": correct the address or the credentials"),
        ("connection failed: Connection refused", ": start the server, or correct the address"),
    ],
)  # fmt: skip
def test_only_a_server_that_does_not_answer_is_to_be_started(
    monkeypatch: pytest.MonkeyPatch, refusal: str, hint: str
) -> None:
    def connect(*_: object) -> None:
        raise psycopg.OperationalError(refusal)

    monkeypatch.setattr(connections, "connect", connect)
    with pytest.raises(RelayError) as raised, connections.reach("", "source.dsn"):
        pass
    assert str(raised.value).endswith(hint)


def test_a_fault_of_users_code_is_described_with_their_line() -> None:
    """Also where what it calls raises: the line in a library says nothing to its author."""
    with pytest.raises(KeyError) as own:
        raise KeyError(SECRET)
    with pytest.raises(json.JSONDecodeError) as called:
        json.loads(SECRET)
    lines = [found.traceback[0].lineno + 1 for found in (own, called)]
    assert describe(own.value) == f"KeyError (test_faults.py:{lines[0]})"
    assert describe(called.value) == f"JSONDecodeError (test_faults.py:{lines[1]})"
    assert describe(KeyError(SECRET)) == "KeyError"


def test_what_would_end_a_thread_keeps_the_line_of_users_code() -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(3)
    error = as_exception(ended.value)
    assert describe(error).startswith("RuntimeError (test_faults.py:")
    assert "test_faults.py" in exception_text(error)


def test_a_part_tells_the_text_of_relays_own_fault() -> None:
    """It told the class alone, as of a fault that users' code raises with values of an event."""

    class Waiting(Recurring):
        def turn(self) -> float:
            raise NotNow("source.dsn: its servers are on different timelines")

    part = Waiting(Condition("waiting", logging.getLogger("relay"), "fails", "goes on"))
    part.step()
    assert part.condition.fault is not None
    assert part.condition.fault.fault == "source.dsn: its servers are on different timelines"
    assert describe(TransientFault("value")) == "TransientFault"
