"""Events that are too large for the process: what is counted, what is left out, and what is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay.admin.dead_letters import DeadLetters
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.model.events import Lsn
from relay.source.decode.assembler import OpenCommit
from relay.source.stream.receiver import FatalCommit, Receiver, ReceiverSuspects
from relay.spark.session import Session
from relay.store.connections import connect
from relay.store.dead_letters.selection import DeadLetterSelection
from tests.outbox import Outbox, event, host, relaying, run_until_fault, wait_until

LIMIT = 50_000
LARGE = {"note": "x" * 2 * LIMIT}


def limited(outbox: Outbox, mode: str = "auto", engine: str = "inline", **more: Any) -> Settings:
    source = {**outbox.config()["source"], "mode": mode, "max_event_bytes": LIMIT}
    return outbox.settings(engine, source=source, **more)


def let_others_write(outbox: Outbox) -> None:
    """relay's own table takes any row, as the table of another origin does."""
    outbox.conn.execute("alter table outbox_message_t drop constraint relay_max_event_bytes")
    outbox.conn.execute(
        "create or replace function relay.max_event_bytes() returns bigint language sql return 1000000000"
    )


class _Meagre:
    """A libpq connection that is refused memory for large messages."""

    def __init__(self, pgconn: psycopg.pq.abc.PGconn) -> None:
        self._pgconn = pgconn

    def consume_input(self) -> None:
        self._pgconn.consume_input()

    def get_copy_data(self, mode: int) -> tuple[int, Any]:
        length, data = self._pgconn.get_copy_data(mode)
        if length > LIMIT:
            raise psycopg.OperationalError("receiving copy data failed: out of memory")
        return length, data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pgconn, name)


@pytest.fixture
def meagre(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver has no memory for large messages."""
    drain = Receiver._drain
    monkeypatch.setattr(
        Receiver,
        "_drain",
        lambda source, pgconn: drain(source, _Meagre(pgconn)),  # type: ignore[arg-type]
    )


def dead_events(outbox: Outbox) -> list[tuple[Any, ...]]:
    return outbox.conn.execute(
        "select c_offset, payload ->> 'amount', by_reference from relay.dead_letter_queue order by c_offset"
    ).fetchall()


def check_passed(outbox: Outbox, settings: Settings, session: Session | None = None) -> None:
    """A commit with a large event among others: only its business transaction is dead."""
    outbox.publish(host(1), event(1))
    let_others_write(outbox)
    with outbox.conn.transaction():
        outbox.publish(host(1), event(2), event(3))
        with outbox.conn.transaction():
            outbox.publish(host(2), event(4), event(5, metadata=LARGE), event(6))
        outbox.publish(host(3), event(7))
    outbox.publish(host(2), event(8))
    with relaying(settings, session):
        outbox.wait_drained()
        outbox.publish(host(2), event(9))
        outbox.wait_drained()
    assert outbox.column("select amount from projection order by c_offset") == [1, 2, 3, 7, 8, 9]
    assert dead_events(outbox) == [(4, "4", False), (5, None, True), (6, "6", False)]
    assert outbox.value("select count(*) from relay.suspects") == 0
    outbox.assert_exact()


@pytest.mark.usefixtures("meagre")
@pytest.mark.parametrize("mode", ["auto", "wal"])
def test_a_commit_that_cannot_be_received_is_passed(outbox: Outbox, mode: str) -> None:
    check_passed(outbox, limited(outbox, mode))
    (exception,) = outbox.column("select distinct exception from relay.dead_letter_queue")
    assert "only in public.outbox_message_t, c_offset 5" in exception


@pytest.mark.usefixtures("meagre")
def test_a_commit_that_cannot_be_received_is_not_passed_where_sinks_would_miss_it(
    outbox: Outbox,
) -> None:
    """With mode wal, a sink gets only what the stream brings."""
    hook = {"type": "http", "url": "http://127.0.0.1:9/"}
    routes = [{"handlers": ["hook"]}]
    settings = limited(outbox, "wal", handlers={"hook": hook}, routes=routes)
    let_others_write(outbox)
    outbox.publish(host(2), event(5, metadata=LARGE))
    assert "cannot be received" in run_until_fault(settings)


@pytest.mark.usefixtures("meagre")
def test_a_commit_that_cannot_be_received_is_passed_on_spark(
    outbox: Outbox, spark_session: Session
) -> None:
    check_passed(outbox, limited(outbox, engine="spark"), spark_session)


def test_a_large_event_that_can_be_received_is_applied(outbox: Outbox) -> None:
    let_others_write(outbox)
    outbox.publish(host(2), event(5, metadata=LARGE))
    outbox.drain(limited(outbox))
    assert outbox.column("select amount from projection") == [5]
    outbox.assert_exact()


def test_a_dead_letter_by_reference_is_replayed_with_another_payload_only(
    outbox: Outbox, tmp_path: Path
) -> None:
    """A process that got the event died of it: its dead letter must not take as much memory."""
    transaction = outbox.publish(host(2), event(4), event(5, metadata=LARGE))
    outbox.conn.execute(
        "insert into relay.suspects (group_id, suspect, attempts) values ('default', %s, 3)",
        (f"2/{transaction}",),
    )
    outbox.conn.execute(
        "insert into relay.groups (group_id, running) values ('default', true)"
        " on conflict (group_id) do update set running = true"
    )
    settings = limited(outbox)
    outbox.drain(settings)
    assert dead_events(outbox) == [(1, "4", False), (2, None, True)]
    with connect(outbox.relay_dsn) as conn:
        dead_letters = DeadLetters(settings, conn)
        found = dead_letters.find(DeadLetterSelection())
        with pytest.raises(ConfigurationError, match="c_offset 2 was too large"):
            dead_letters.replay(found, None)
        edits = tmp_path / "edits.jsonl"
        second = outbox.value("select id from relay.dead_letter_queue where by_reference")
        edits.write_text(json.dumps({"id": second, "payload": {"amount": 5}}))
        assert len(dead_letters.replay(found, None, edits)) == 1
    with relaying(settings):
        wait_until(lambda: outbox.value("select count(*) from projection") == 2)


def test_deaths_of_the_receiver_are_counted_over_a_commit(outbox: Outbox) -> None:
    settings = limited(outbox, crash_limit=2)
    fatal = OpenCommit(Lsn(5000), 700)
    attempts = "select coalesce(sum(attempts), 0) from relay.suspects"

    @contextmanager
    def restarted() -> Iterator[ReceiverSuspects]:
        with closing(ReceiverSuspects(settings)) as receiver_suspects:
            receiver_suspects.guard()
            receiver_suspects.count_received(100, OpenCommit(Lsn(4000), 699))
            yield receiver_suspects

    for deaths in (1, 2):
        with restarted() as dying:
            dying.count_received(100, fatal)
        # The commit before was survived.
        assert outbox.value(attempts) == deaths
    with restarted() as careful:
        with pytest.raises(FatalCommit):
            careful.count_received(100, fatal)
        assert outbox.value(attempts) == 2
        careful.forget(fatal)

    with restarted() as lost:
        lost.count_received(100, fatal)
        lost.survived()
    assert outbox.value(attempts) == 0
    with closing(ReceiverSuspects(settings)) as unguarded:
        unguarded.count_received(100, fatal)
    assert outbox.value(attempts) == 0
