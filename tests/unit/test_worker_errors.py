"""What a worker, and who declares a schedule, say of a wrong argument, a refused connection or a missing right."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pytest

from relay.cli.work import work
from relay.client import Event, worker
from relay.client.errors import EventInvalid, WorkerError, outage_of
from relay.client.schedule import EventSchedule
from relay.client.worker import Queue, Worker
from relay.faults import ConfigurationError


@pytest.mark.parametrize("named", ["mail", ":worker", "mail:", ":"])
def test_a_worker_is_named_by_a_module_and_a_name(named: str) -> None:
    with pytest.raises(ConfigurationError, match="name a module and a worker in it"):
        work(named)


def test_a_connection_string_that_is_none_ends_the_worker_without_quoting_it() -> None:
    worker = Worker("secret", "mail")
    worker.handles()(lambda message, conn: None)
    with pytest.raises(
        WorkerError, match="the connection string of the worker's database"
    ) as caught:
        asyncio.run(worker.run())
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_argument_of_a_queue_that_json_cannot_represent_ends_the_worker() -> None:
    worker = Worker("dbname=shop", Queue(name="mail", params={"least": Decimal("9.99")}))
    worker.handles()(lambda message, conn: None)
    with pytest.raises(WorkerError, match=r"queue mail: params: cannot be .* Decimal"):
        asyncio.run(worker.run())
    with pytest.raises(WorkerError, match="queue mail: backoff: cannot be written"):
        Queue(name="mail", backoff=float("nan")).declaration()


def test_a_refused_connection_is_told_and_an_error_of_a_statement_is_not() -> None:
    refused = psycopg.OperationalError('connection failed:\n FATAL:  database "shop" is missing')
    assert outage_of(refused) == (
        'OperationalError: connection failed: FATAL: database "shop" is missing'
    )
    assert outage_of(ConnectionRefusedError(111, "refused")).endswith("refused")
    assert outage_of(psycopg.errors.AdminShutdown("of an event")) == "AdminShutdown"
    wrapped = RuntimeError("with the parameters of a statement")
    wrapped.__cause__ = refused
    assert outage_of(wrapped) == outage_of(refused)


@dataclass
class _Report:
    day: UUID


def _declared(payload: Any) -> Any:
    event = Event("cron.report", payload=payload)
    return json.loads(EventSchedule(name="a", every=60, event=event, host_id="h")._arguments())


def test_a_schedule_has_the_payload_that_publishing_would_have() -> None:
    """`str` was written of what JSON does not know: the payload was a text."""
    assert _declared(_Report(UUID(int=1)))["publish"]["payload"] == {"day": str(UUID(int=1))}
    for payload in ({"a": float("nan")}, {"a": object()}):
        with pytest.raises(EventInvalid, match=r"payload\.a"):
            _declared(payload)


def test_an_outage_is_logged_once_for_all_slots(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen slots that try again at once filled the log: 127 lines in 25 seconds."""
    link = Worker("host=127.0.0.1 port=1", "mail", concurrency=8, listen=False)
    link.handles()(lambda message, conn: None)
    failed: list[Exception] = []

    def counted(error: Exception) -> str:
        failed.append(error)
        if len(failed) == 20:
            link.stop()
        return "refused"

    monkeypatch.setattr(worker, "outage_of", counted)
    asyncio.run(link.run())
    assert caplog.messages.count("the database does not answer: refused") == 1
