"""A fault of the target that comes again for one transaction is that transaction's: it neither blocks nor spreads.

A single job that pauses, exceeds a limit of its session or is cancelled each time has stopped a whole worker in
msolli/proletarian#26, level12/pals#28, osm-search/Nominatim#3083 and colophon-group/jobseek#1105 (idle in transaction),
oban-bg/oban#137 and oban-bg/oban#446 (one job tried for ever, in front of all others). What a deferred constraint or
trigger raises comes with the commit, where nobody looked for it, in spring-projects/spring-batch#2617,
SweetProcess/django-pg-queue#16, OCA/queue#41 and porsager/postgres#1117.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from relay.config.settings import Settings
from relay.spark.session import Session
from tests.integration.test_polling import poll_all
from tests.outbox import APPEND, Outbox, event, host, relaying, wait_until

LIMITS = (
    "-c idle_in_transaction_session_timeout=300ms -c statement_timeout=1s -c lock_timeout=200ms"
)
OTHERS = 39
FAULTS = {
    "pause": "25P03",
    "statement": "StatementTimeout",
    "temporary": "53400",
    "lock": "55P03",
    "raise 53100": "53100",
    "raise 53200": "53200",
    "raise 57P01": "57P01",
    "raise XX000": "XX000",
    "raise 40001": "40001",
    "raise 54001": "54001",
}
AT_THE_COMMIT = {
    "raise exception 'no' using errcode = '53100'": "53100",
    "raise exception 'no' using errcode = '40001'": "40001",
    "raise exception 'no' using errcode = '57014'": "StatementTimeout",
    "perform from held for update": "55P03",
}
"""What a deferred trigger runs, and the fault."""
DEFERRED = """
    create function hurt() returns trigger language plpgsql as $$
    begin
        if new.amount = 0 then
            {};
        end if;
        return null;
    end $$;
    create constraint trigger hurt after insert on projection deferrable initially deferred
        for each row execute function hurt()
"""


def settings(
    outbox: Outbox, engine: str = "inline", order_by: str = "host", **retry: Any
) -> Settings:
    handler = {
        "type": "python",
        "callable": "tests.callables:hurt",
        "order_by": order_by,
        "retry": retry,
    }
    # Only a superuser may set it.
    outbox.conn.execute(f"alter database {outbox.slot} set temp_file_limit = '4MB'".encode())
    return outbox.settings(
        engine,
        handlers={"python": handler},
        routes=[{"handlers": ["python"]}],
        target={"dsn": make_conninfo(outbox.relay_dsn, options=LIMITS)},
    )


def publish(outbox: Outbox, kind: str) -> Any:
    for number in range(OTHERS // 2):
        outbox.publish(host(number + 2), event(number + 100))
    poison = outbox.publish(host(1), event(0, aggregate_id=kind))
    for number in range(OTHERS // 2, OTHERS):
        outbox.publish(host(number + 2), event(number + 100))
    return poison


@contextmanager
def locked(outbox: Outbox) -> Iterator[None]:
    """Hold the row that `lock` needs, and limit temporary files, which an administrator may."""
    outbox.conn.execute("create table held as select 1 as id")
    outbox.conn.execute(f"alter database \"{outbox.slot}\" set temp_file_limit = '4MB'".encode())
    with psycopg.connect(outbox.superuser_dsn) as conn:
        conn.execute("select from held for update")
        yield


def dead(outbox: Outbox) -> list[tuple[Any, ...]]:
    return outbox.conn.execute(
        "select transaction_id::uuid, handler, exception from relay.dead_letter_queue"
    ).fetchall()


def test_one_transaction_is_given_up_as_retry_says_and_the_others_flow(
    outbox: Outbox, subtests: pytest.Subtests
) -> None:
    with locked(outbox), relaying(settings(outbox, attempts=2, wait=0.1, jitter=0)):
        for number, (kind, fault) in enumerate(FAULTS.items(), 1):
            with subtests.test(kind):
                # One batch.
                with outbox.conn.transaction():
                    poison = publish(outbox, kind)
                outbox.wait_handled()
                found = {transaction: told for transaction, *told in dead(outbox)}
                assert len(found) == number
                handler, exception = found[poison]
                assert handler == "python"
                assert fault in exception
                wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
                assert outbox.value("select count(*) from projection") == number * OTHERS
    outbox.assert_exact()


def test_it_is_found_on_both_engines(outbox: Outbox, engine: str, session: Session | None) -> None:
    publish(outbox, "pause")
    outbox.drain(settings(outbox, engine), session)
    assert outbox.value("select count(*) from projection") == OTHERS
    reason = outbox.value("select handler || ': ' || reason from relay.deferred")
    assert reason.startswith("python: IdleInTransactionSessionTimeout")


@pytest.mark.parametrize("what", AT_THE_COMMIT)
def test_what_a_deferred_trigger_raises_is_of_one(outbox: Outbox, what: str) -> None:
    """It comes with the commit of all, and of no handler."""
    with locked(outbox):
        outbox.conn.execute(DEFERRED.format(what).encode())
        poison = publish(outbox, "none")
        with relaying(settings(outbox, attempts=2, wait=0.1, jitter=0)):
            wait_until(lambda: outbox.value("select count(*) from projection") == OTHERS)
            wait_until(lambda: bool(dead(outbox)))
    ((transaction, handler, exception),) = dead(outbox)
    assert (transaction, handler) == (poison, "python")
    assert AT_THE_COMMIT[what] in exception
    outbox.assert_exact()


def test_a_deferred_trigger_hurts_on_both_engines(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    what, fault = next(iter(AT_THE_COMMIT.items()))
    outbox.conn.execute(DEFERRED.format(what).encode())
    publish(outbox, "none")
    outbox.drain(settings(outbox, engine), session)
    assert outbox.value("select count(*) from projection") == OTHERS
    assert fault in outbox.value("select reason from relay.deferred")


def test_without_a_limit_it_is_deferred_and_an_operator_gives_it_up(outbox: Outbox) -> None:
    """A statement has no `retry`: its transaction is tried again, later and later."""
    statement = APPEND.replace("values (", "select ").rstrip().removesuffix(")") + (
        " from pg_sleep(case when %(aggregate_id)s = 'slow' then 5 else 0 end)"
    )
    config = outbox.settings(
        handlers={"slow": {"type": "sql", "statement": statement}},
        routes=[{"handlers": ["slow"]}],
        target={"dsn": make_conninfo(outbox.relay_dsn, options=LIMITS)},
    )
    publish(outbox, "slow")
    with relaying(config):
        wait_until(lambda: outbox.value("select count(*) from projection") == OTHERS)
        wait_until(lambda: outbox.value("select max(attempts) from relay.deferred") == 2)
        assert not dead(outbox)
        assert "statement_timeout" in outbox.value("select reason from relay.deferred")


IN_TRANSACTION = """
    select pid from pg_stat_activity
     where datname = current_database() and xact_start is not null and application_name ~ '^relay'
"""


@pytest.mark.parametrize("pause", [0, 2])
def test_a_lock_that_all_wait_for_dead_letters_nothing(outbox: Outbox, pause: int) -> None:
    """The handler applies no other transaction meanwhile, so no attempt counts."""
    tried = "select count(*) from relay.deferred where reason is not null"
    with relaying(settings(outbox, attempts=1, wait=0.1, jitter=0)):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        with psycopg.connect(outbox.superuser_dsn) as conn:
            conn.execute("select pg_sleep(%s)", (pause,))
            conn.execute("lock table projection in share mode")
            for number in range(15):
                outbox.publish(host(number + 2), event(number + 100))
            wait_until(lambda: outbox.value(tried) >= 10)
            # If the lock ended within a task, some of its attempts would fail and others succeed.
            wait_until(lambda: not outbox.column(IN_TRANSACTION), every=0.001)
        outbox.wait_handled()
        wait_until(lambda: outbox.value("select count(*) from projection") == 16)
    assert not dead(outbox)
    outbox.assert_exact()


def test_after_ten_in_a_row_the_others_are_deferred_without_an_attempt(outbox: Outbox) -> None:
    """Each attempt costs as long as the time-out."""
    with outbox.conn.transaction():
        for number in range(15):
            outbox.publish(host(1), event(number, aggregate_id="lock"))
    with locked(outbox):
        poll_all(settings(outbox, order_by="none"))
    failed, blocked = outbox.conn.execute(
        "select count(reason), count(*) filter (where reason is null) from relay.deferred"
    ).fetchall()[0]
    assert (failed, blocked) == (10, 5)
    assert not dead(outbox)


def test_a_session_that_ended_once_says_nothing_of_its_transaction(outbox: Outbox) -> None:
    outbox.conn.execute("create sequence pauses")
    publish(outbox, "pause once")
    outbox.drain(settings(outbox, attempts=1))
    assert outbox.value("select count(*) from projection") == OTHERS + 1
    assert not dead(outbox)
    outbox.assert_exact()
