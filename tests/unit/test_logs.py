"""Log lines: one event, one line, in the form that was asked for."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from unittest.mock import Mock

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import format_span_id, format_trace_id

from relay import logs
from relay.cli.options import fail
from relay.logs import LogFormat
from relay.model.batch import DeadLetterReport
from relay.model.events import Lsn
from relay.runtime import threads
from relay.runtime.parts import Condition
from relay.source.recognition import Unavailable
from relay.source.stream.replication import Replication

log = logging.getLogger("relay.test")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Logging belongs to the whole process. PySpark's loggers stay quiet: it cannot write to one that logging made."""
    names = ("", "relay", "psycopg.pool", "py4j")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    handlers = list(logging.getLogger().handlers)
    # A service that ended in a batch, in this process, leaves its number.
    logs.BATCH.set(None)
    yield
    logging.getLogger().handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def raise_and_log() -> None:
    try:
        raise ValueError("reason")
    except ValueError:
        log.exception("failed")


def test_a_json_line_holds_time_level_logger_message_and_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure(LogFormat.JSON, "info")
    log.info("batch %d", 7, extra={"events": 3, "lsn": "0/A", "transaction_id": None})
    line = json.loads(capsys.readouterr().err)
    time = datetime.fromisoformat(line.pop("ts"))
    assert time.utcoffset() == UTC.utcoffset(None)
    assert abs((datetime.now(UTC) - time).total_seconds()) < 60
    assert line == {
        "level": "info",
        "logger": "relay.test",
        "message": "batch 7",
        "events": 3,
        "lsn": "0/A",
    }


@pytest.mark.parametrize("value", ["two\nlines", 'quo"te', "Zoë 😀", "\udcff", "\x1b[31m", ""])
def test_a_json_line_is_one_line_whatever_it_says(
    capsys: pytest.CaptureFixture[str], value: str
) -> None:
    logs.configure(LogFormat.JSON, "info")
    log.info("said: %s", value, extra={"fault": value})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isascii()
    found = json.loads(line)
    assert (found["message"], found["fault"]) == (f"said: {value}", value)


def test_a_value_that_json_does_not_have_is_written_as_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure(LogFormat.JSON, "info")
    log.info("x", extra={"at": datetime(2026, 1, 1, tzinfo=UTC)})
    assert json.loads(capsys.readouterr().err)["at"] == "2026-01-01 00:00:00+00:00"


def test_a_traceback_is_a_field_in_json_and_follows_in_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure(LogFormat.JSON, "info")
    raise_and_log()
    assert "ValueError: reason" in json.loads(capsys.readouterr().err)["traceback"]
    logs.configure(LogFormat.TEXT, "info")
    raise_and_log()
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.endswith("error   failed")
    assert rest[-1] == "ValueError: reason"


def test_a_text_line_reads_time_level_message_and_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure(LogFormat.TEXT, "info")
    log.warning("dead letter", extra={"events": 3, "handler": None, "lsn": "0/A"})
    time, rest = capsys.readouterr().err.rstrip("\n").split(" ", 1)
    assert datetime.fromisoformat(time).utcoffset() == UTC.utcoffset(None)
    assert rest == "warning dead letter events=3 lsn=0/A"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "plain"),
        ("two words", '"two words"'),
        ("", '""'),
        ("a=b", '"a=b"'),
        ('quo"te', '"quo\\"te"'),
        ("two\nlines", '"two\\nlines"'),
        ("over\rwritten", '"over\\rwritten"'),
        ("tab\tbed", '"tab\\tbed"'),
        ("\x1b[31mred", '"\\u001b[31mred"'),
        (3, "3"),
    ],
)
def test_a_field_cannot_break_out_of_its_text_line(
    capsys: pytest.CaptureFixture[str], value: object, shown: str
) -> None:
    logs.configure(LogFormat.TEXT, "info")
    log.info("x", extra={"fault": value})
    assert capsys.readouterr().err.endswith(f" x fault={shown}\n")


@pytest.mark.parametrize(
    ("level", "heard"),
    [("debug", ["debug", "info", "warning"]), ("INFO", ["info", "warning"]), ("error", [])],
)
def test_the_level_counts_for_relay(
    capsys: pytest.CaptureFixture[str], level: str, heard: list[str]
) -> None:
    logs.configure(LogFormat.JSON, level)
    log.debug("x")
    log.info("x")
    log.warning("x")
    assert [json.loads(line)["level"] for line in capsys.readouterr().err.splitlines()] == heard


def test_others_are_heard_only_when_they_warn_and_the_pool_not_at_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The pool's quote libpq, PySpark's quote values, and both say again what the fault of the task says."""
    logs.configure(LogFormat.JSON, "debug")
    for name in ("other", "psycopg.pool", "py4j", "SQLQueryContextLogger"):
        logging.getLogger(name).info("x")
        logging.getLogger(name).error("x")
    assert [json.loads(line)["logger"] for line in capsys.readouterr().err.splitlines()] == [
        "other"
    ]


def test_configuring_twice_writes_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogFormat.TEXT, "info")
    logs.configure(LogFormat.JSON, "info")
    log.info("once")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "once"


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        logs.configure(LogFormat.TEXT, "loud")


def test_a_line_that_repeats_comes_at_once_and_then_with_the_sum(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((1_000.0, 1_001.0, 1_009.0, 1_010.0, 1_011.0, 1_011.0, 9_000.0))
    monkeypatch.setattr("relay.logs.time.monotonic", lambda: next(clock))
    lines = logs.RepeatedLines(log, logging.WARNING, "deferred", "attempts", interval=10.0)
    for _ in range(5):
        lines.note(2, handler="shop", fault="HTTP 503")
    lines.note(1, handler="shop", fault="HTTP 404")
    lines.note(1, handler="shop", fault="HTTP 503")
    said = [(vars(record)["fault"], vars(record)["attempts"]) for record in caplog.records]
    assert said == [("HTTP 503", 2), ("HTTP 503", 6), ("HTTP 404", 1), ("HTTP 503", 3)]


def test_lines_of_a_group_and_of_the_threads_that_it_makes_name_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure(LogFormat.JSON, "info")

    def relay(group: str) -> None:
        logs.of_group(group)
        with threads.pool(1, "apply") as pool:
            pool.submit(log.info, "pool")
        nested = threads.Thread(log.info, args=("thread",))
        nested.start()
        nested.join()
        log.info("own", extra={"group": "given"})

    for group in ("orders", "payments"):
        thread = threads.Thread(relay, args=(group,))
        thread.start()
        thread.join()
    log.info("process")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    found = [(line["message"], line.get("group")) for line in lines]
    assert found[:3] == [("pool", "orders"), ("thread", "orders"), ("own", "given")]
    assert found[3:5] == [("pool", "payments"), ("thread", "payments")]
    assert found[-1] == ("process", None)


def test_lines_inside_a_batch_and_a_span_name_both(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogFormat.JSON, "info")
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    token = logs.BATCH.set(17)
    try:
        with tracer.start_as_current_span("send hook") as span:
            log.info("inside")
            log.info("of another", extra={"batch": 3, "trace_id": "given"})
    finally:
        logs.BATCH.reset(token)
    log.info("outside")
    inside, other, outside = map(json.loads, capsys.readouterr().err.splitlines())
    context = span.get_span_context()
    assert inside["batch"] == 17
    assert inside["trace_id"] == format_trace_id(context.trace_id)
    assert inside["span_id"] == format_span_id(context.span_id)
    assert (other["batch"], other["trace_id"]) == (3, "given")
    assert not {"batch", "trace_id", "span_id"} & set(outside)


def test_a_dead_letter_that_was_polled_has_no_lsn() -> None:
    assert DeadLetterReport(None, Lsn(0), 1, "hook", "").fields["lsn"] is None
    assert DeadLetterReport(None, Lsn(16), 1, "hook", "").fields["lsn"] == "0/10"


def test_why_nothing_is_streamed_is_a_field(caplog: pytest.LogCaptureFixture) -> None:
    condition = Condition("replication", logging.getLogger("relay"), "cannot stream yet", "over")
    source = Mock(condition=condition)
    for _ in range(2):
        Replication._note_why(source, Unavailable("the slot is lost"))
    source.unavailable.assert_called_with("cannot stream yet: the slot is lost", True)
    (record,) = caplog.records
    assert (record.getMessage(), vars(record)["fault"]) == ("cannot stream yet", "the slot is lost")


def test_the_error_that_ends_a_command_has_the_format_of_the_logs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure(LogFormat.JSON, "error")
    with pytest.raises(SystemExit) as ended:
        fail("a: b\nc: d", 2)
    assert ended.value.code == 2
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["level"], line["fault"]) for line in lines] == [
        ("error", "a: b"),
        ("error", "c: d"),
    ]
    logs.configure(LogFormat.TEXT, "error")
    with pytest.raises(SystemExit):
        fail("a: b", 1)
    assert capsys.readouterr().err == "relay: a: b\n"
