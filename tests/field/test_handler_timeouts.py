"""A Python handler that hangs is given up after its timeout, and other handlers and hosts flow.

coleifer/huey#864, graphile/worker#278, cardstack/boxel#1996 and humanmade/Cavalcade#18: one task that never ends holds
its worker for ever. commanded/commanded#653: a handler of batches had no timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from relay.config.settings import Settings
from relay.model.events import Transaction
from relay.pipeline import failure_limit
from relay.runtime.timed import MOST_UNENDED
from relay.spark.session import Session
from tests.callables import record
from tests.outbox import APPEND, Outbox, event, host, relaying, wait_until

MAY_END = threading.Event()


def hang(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Record events; wait in Python or in the server where an event says so, and go on afterwards."""
    for each in transaction.events:
        if each.aggregate_id == "waits":
            MAY_END.wait(60)
        elif each.aggregate_id == "queries":
            cursor.execute("select pg_sleep(60)")
        elif each.aggregate_id == "streams":
            for _ in cursor.stream("select generate_series(1, 9)"):
                MAY_END.wait(60)
    record(transaction, cursor)


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    MAY_END.clear()
    yield
    MAY_END.set()


def settings(outbox: Outbox, engine: str = "inline", **retry: Any) -> Settings:
    return outbox.settings(
        engine,
        handlers={
            "slow": {
                "type": "python",
                "callable": f"{__name__}:hang",
                "timeout": 0.5,
                "retry": retry,
            },
            "other": {"type": "sql", "statement": APPEND},
        },
        routes=[
            {"match": {"event_type": "slow"}, "handlers": ["slow"]},
            {"handlers": ["other"]},
        ],
    )


@pytest.mark.parametrize("how", ["waits", "queries", "streams"])
def test_others_flow_and_the_call_is_given_up_as_retry_says(outbox: Outbox, how: str) -> None:
    with relaying(settings(outbox, attempts=2, wait=0.1, jitter=0)):
        for number in range(1, 4):
            outbox.publish(host(number), event(number))
        hung = outbox.publish(host(9), event(9, "slow", aggregate_id=how))
        for number in range(4, 7):
            outbox.publish(host(number), event(number))
        outbox.publish(host(7), event(7, "slow"))
        dead = "select transaction_id::uuid, handler, exception from relay.dead_letter_queue"
        wait_until(lambda: bool(outbox.column(dead)))
        wait_until(lambda: outbox.value("select count(*) from projection") == 7)
        # Nobody has let it end.
        assert not MAY_END.is_set()
        ((transaction, handler, exception),) = outbox.conn.execute(dead).fetchall()
        assert (transaction, handler) == (hung, "slow")
        assert "timeout of 0.5 s" in exception
        sleeping = "select count(*) from pg_stat_activity where query = 'select pg_sleep(60)'"
        wait_until(lambda: outbox.value(sleeping) == 0)
        MAY_END.set()
    assert outbox.value("select count(*) from projection where amount = 9") == 0
    outbox.assert_exact()


def test_calls_that_do_not_end_are_bounded(outbox: Outbox) -> None:
    """Each time-out left a thread behind, and each retry another one, as in ruby-concurrency/concurrent-ruby#639."""
    occupied = (
        "select count(*) from relay.deferred where strpos(reason, 'nothing is called') > 0"
        " and strpos(reason, 'in hang') > 0"
    )
    with relaying(settings(outbox, wait=0.05, max_wait=0.1, jitter=0, attempts=3)):
        for number in range(20, 34):
            outbox.publish(host(number), event(number, "slow", aggregate_id="waits"))
        wait_until(lambda: outbox.value(occupied) >= 1, 120)
        outbox.publish(host(50), event(50))
        wait_until(lambda: outbox.value("select count(*) from projection") == 1)
        threads = [each for each in threading.enumerate() if each.name == "python handler"]
        assert MOST_UNENDED <= len(threads) <= MOST_UNENDED + 2
        MAY_END.set()
        wait_until(lambda: outbox.value("select count(*) from projection") == 15, 120)
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0


def test_on_both_engines(outbox: Outbox, engine: str, session: Session | None) -> None:
    outbox.publish(host(9), event(9, "slow", aggregate_id="waits"))
    outbox.publish(host(1), event(1))
    outbox.drain(settings(outbox, engine), session)
    assert outbox.value("select count(*) from projection") == 1
    assert "HandlerTimeout" in outbox.value("select reason from relay.deferred")


@pytest.mark.parametrize("how", ["waits", "queries", "streams"])
def test_what_is_not_reliable_skips_the_call_and_nothing_else(outbox: Outbox, how: str) -> None:
    """The session has ended: no savepoint of it is left to go back to, which all transactions of the batch need."""
    config = settings(outbox)
    slow = config.handlers["slow"].model_copy(update={"reliable": False})
    config = config.model_copy(update={"handlers": {**config.handlers, "slow": slow}})
    for number in range(1, 4):
        outbox.publish(host(number), event(number))
    outbox.publish(host(9), event(9, "slow", aggregate_id=how))
    outbox.publish(host(8), event(8, "slow"))
    outbox.publish(host(4), event(4))
    outbox.drain(config)
    assert sorted(outbox.column("select amount::int from projection")) == [1, 2, 3, 4, 8]
    assert not MAY_END.is_set()
    assert outbox.value("select count(*) from relay.deferred") == 0
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0


def test_a_function_that_always_hangs_holds_others_back_for_a_minute(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eleven time-outs of 30 s, one after the other: TheHive-Project/Cortex#410, pools full of what hangs."""
    monkeypatch.setattr(failure_limit, "_SECONDS_OF_ONE", 0.1)
    for number in range(1, 9):
        outbox.publish(host(number), event(number, "slow", aggregate_id="waits"))
    outbox.publish(host(9), event(9))
    outbox.drain(settings(outbox))
    assert outbox.column("select amount::int from projection") == [9]
    # Half a second counts as five: two of them are tried, and the others later.
    tried = "select count(*) from relay.deferred where reason is not null"
    assert outbox.value(tried) == 2
    assert outbox.value("select count(*) from relay.deferred") == 8


def test_a_limit_is_for_each_transaction(outbox: Outbox) -> None:
    """Many that take their time together are not too slow."""
    for number in range(40):
        outbox.publish(host(number), event(number + 100, "slow"))
    config = outbox.settings(
        handlers={
            "slow": {"type": "python", "callable": f"{__name__}:rest", "timeout": 0.4},
        },
        routes=[{"handlers": ["slow"]}],
    )
    outbox.drain(config)
    assert outbox.value("select count(*) from projection") == 40
    assert outbox.value("select count(*) from relay.deferred") == 0


def rest(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    MAY_END.wait(0.02)
    record(transaction, cursor)
