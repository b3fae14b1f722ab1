"""When an outage of the database is logged: at its beginning and at its end, by workers and by readers."""

from __future__ import annotations

import asyncio
import logging

import psycopg
import pytest

from relay.client import claimed_reader, wakeups
from relay.client.idle import Idle
from relay.client.outages import OutageLog
from relay.client.reader import subscribe

_LOGGER = logging.getLogger("relay.test")


def _outage(caplog: pytest.LogCaptureFixture, now: list[float]) -> OutageLog:
    caplog.set_level("INFO", "relay.test")
    return OutageLog(_LOGGER, {"queue": "mail"}, clock=lambda: now[0])


def test_an_outage_is_over_when_the_last_caller_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    outage = _outage(caplog, now)
    outage.ends("a")
    outage.fails("a", "refused")
    outage.fails("b", "refused")
    now[0] = 31.0
    outage.ends("b")
    outage.ends("b")
    now[0] = 40.0
    outage.ends("a")
    assert caplog.messages == [
        "the database does not answer: refused",
        "the database answers again",
    ]
    assert (caplog.records[-1].__dict__["queue"], caplog.records[-1].__dict__["seconds"]) == (
        "mail",
        40,
    )
    outage.fails("a", "refused")
    assert len(caplog.messages) == 3, "another outage"


def test_another_cause_of_an_outage_is_logged_from_time_to_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However long it lasts, the same cause is one line."""
    now = [0.0]
    outage = _outage(caplog, now)
    for now[0] in map(float, range(0, 3600, 7)):
        outage.fails("a", "refused")
    outage.fails("a", "no such role")
    for _ in range(10):
        outage.fails("b", "no such database")
    assert caplog.messages == [
        "the database does not answer: refused",
        "the database does not answer: no such role",
    ]


def test_who_gives_up_neither_ends_an_outage_nor_keeps_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outage = _outage(caplog, [0.0])
    began, ended = "the database does not answer: refused", "the database answers again"
    for caller in ("a", "b"):
        outage.fails(caller, "refused")
    for caller in ("a", "a", "b"):
        outage.leaves(caller)
    assert caplog.messages == [began]
    for caller in ("a", "b"):
        outage.fails(caller, "refused")
    outage.ends("b")
    assert caplog.messages == [began, began]
    outage.leaves("a")
    assert caplog.messages == [began, began, ended]


def test_a_reader_logs_an_outage_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it tries again; one that is stopped does not say that it is over."""
    caplog.set_level("INFO", "relay.reader")
    monkeypatch.setattr(claimed_reader, "_FIRST_OUTAGE_SECONDS", 0.001)
    monkeypatch.setattr(claimed_reader, "_LONGEST_OUTAGE_SECONDS", 0.001)
    reader = subscribe("host=127.0.0.1 port=1", "r")
    failed: list[Exception] = []

    def counted(error: Exception) -> str:
        failed.append(error)
        if len(failed) == 20:
            reader.stop()
        return "refused"

    monkeypatch.setattr(claimed_reader, "outage_of", counted)
    assert list(reader) == []
    assert caplog.messages == ["the database does not answer: refused"]
    assert caplog.records[0].__dict__["reader"] == "r"


def test_the_connection_that_listens_is_lost_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "_FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(wakeups, "_LONGEST_PAUSE_SECONDS", 0.001)
    tries: list[int] = []

    async def scenario() -> None:
        tried_often = asyncio.Event()

        async def refused(*given: object, **named: object) -> None:
            tries.append(1)
            if len(tries) == 20:
                tried_often.set()
            raise psycopg.OperationalError("the server is gone")

        monkeypatch.setattr(psycopg.AsyncConnection, "connect", refused)
        listening = asyncio.create_task(wakeups.listen("", "mail", Idle(3600)))
        await tried_often.wait()
        listening.cancel()
        await asyncio.wait([listening])

    asyncio.run(scenario())
    assert caplog.messages == [
        "the connection that listens was lost: OperationalError: the server is gone"
    ]
