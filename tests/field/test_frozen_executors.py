"""A process with a task of the pipeline is frozen: it holds locks of the target, and Spark does not notice.

Reports of the kind: apache/datafusion-ballista#2159, kagkarlsson/db-scheduler#402, cockroachdb/cockroach#23980,
apache/airflow#23520.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay import Transaction
from relay.spark import engine
from relay.spark.engine import JobLimits
from relay.spark.session import Session
from relay.store.handler_sessions import KeepAlive
from tests.outbox import Outbox, event, host, relaying, wait_until

HERE = "tests.field.test_frozen_executors"


def freeze_once(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """A Python handler that stops its process after its first effect, unless one was stopped before."""
    events = list(transaction.events)
    for each in events:
        cursor.execute(
            "insert into projection (id, host_id, c_offset) values (%s, %s, %s)",
            (each.id, each.host_id, each.c_offset),
        )
    folder = Path(str(events[0].payload["folder"]))
    if os.getpid() == events[0].payload["driver"]:
        return
    with suppress(FileExistsError):
        (folder / "frozen").touch(exist_ok=False)
        (folder / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.rare
def test_a_frozen_python_worker_stops_the_group_for_a_bounded_time(
    outbox: Outbox,
    spark_session: Session,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine, "LIMITS", JobLimits(poll=0.2, late=2.5))
    handlers = {"projection": {"type": "python", "callable": f"{HERE}:freeze_once"}}
    settings = outbox.settings("spark", handlers=handlers)
    payload = {"folder": str(tmp_path), "driver": os.getpid()}
    for number in range(20):
        outbox.publish(host(number), event(1, payload=payload))
    try:
        with relaying(settings, spark_session):
            wait_until((tmp_path / "pid").exists)
            outbox.wait_handled()
            outbox.publish(host(1), event(1, payload=payload))
            outbox.wait_handled()
            wait_until(
                lambda: "a Spark task was late" in outbox.column("select reason from relay.engines")
            )
    finally:
        with suppress(ProcessLookupError, FileNotFoundError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    outbox.assert_exact()
    assert "ended the sessions of Spark tasks without a sign of life" in caplog.text


def take_long(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """A Python handler."""
    time.sleep(1.5)
    freeze_once(transaction, cursor)


def test_a_task_that_takes_long_is_not_given_up(
    outbox: Outbox, spark_session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a slot, which what Spark's status store says of it may show seconds later."""
    monkeypatch.setattr(engine, "LIMITS", JobLimits(poll=0.1, starved=0.5))
    (tmp_path / "frozen").touch()
    handlers = {"projection": {"type": "python", "callable": f"{HERE}:take_long"}}
    outbox.publish(host(1), event(1, payload={"folder": str(tmp_path), "driver": 0}))
    outbox.drain(outbox.settings("spark", handlers=handlers), spark_session)
    assert outbox.column("select reason from relay.engines") == ["large"]
    outbox.assert_exact()


def test_a_handler_that_computes_for_long_keeps_its_session(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends the session of a process that gives no sign of life, and of no other."""
    monkeypatch.setattr("relay.store.handler_sessions.SIGN_SECONDS", 0.1)
    limit = "set idle_in_transaction_session_timeout = '600ms'"
    keep_alive = KeepAlive()
    try:
        with psycopg.connect(database) as conn:
            conn.execute(limit)
            with keep_alive.within(conn):
                time.sleep(1.0)
                assert conn.execute("select 1").fetchone() == (1,)
                with pytest.raises(psycopg.errors.UndefinedTable):
                    conn.execute("select * from nowhere")
                time.sleep(1.0)
                conn.rollback()
            conn.execute(limit)
            time.sleep(1.0)
            with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
                conn.execute("select 1")
    finally:
        keep_alive.close()
