"""What becomes of events, on both engines: effects, dead letters, order, atomicity."""

from __future__ import annotations

import gc
import threading
import uuid
from collections import Counter
from typing import Any

import pytest
from py4j.finalizer import ThreadSafeFinalizer
from py4j.java_gateway import JavaObject

from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.handlers import relation
from relay.handlers import sql as handlers_sql
from relay.spark.session import Session
from tests.outbox import PROJECTION, Outbox, event, host, relaying, wait_until


def dead(outbox: Outbox) -> list[tuple[object, ...]]:
    return outbox.conn.execute(
        "select transaction_id::uuid, handler, exception, payload from relay.dead_letter_queue order by id"
    ).fetchall()


def test_every_event_is_applied_once_in_order(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    outbox.fill(300, events=4, hosts=10)
    outbox.drain(outbox.settings(engine), session)
    assert outbox.value("select count(*) from projection") == 1200
    outbox.assert_exact()


def test_failing_transactions_between_good_ones(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    """Of a transaction all events die; the others of its commit are applied, and those of its host that follow."""
    outbox.publish(host(1), event(1), event(2))
    refused = outbox.publish(host(1), event(3), event(-1), event(4))
    unwanted = outbox.publish(host(1), event("a lot"))
    with outbox.conn.transaction():
        outbox.publish(host(1), event(5))
        in_commit = outbox.publish(host(1), event(-1), event(6))
        outbox.publish(host(2), event(7))
    outbox.publish(host(1), event(8))
    outbox.drain(outbox.settings(engine), session)
    assert sorted(outbox.column("select amount from projection")) == [1, 2, 5, 7, 8]
    dead_letters = dead(outbox)
    assert [(dead_letter[0], dead_letter[3]) for dead_letter in dead_letters] == [
        *((refused, {"amount": amount}) for amount in (3, -1, 4)),
        (unwanted, {"amount": "a lot"}),
        *((in_commit, {"amount": amount}) for amount in (-1, 6)),
    ]
    assert {dead_letter[1] for dead_letter in dead_letters} == {"projection"}
    for transaction, _, exception, _ in dead_letters:
        if transaction == unwanted:
            assert str(exception).startswith("InvalidTextRepresentation [22P02]")
        else:
            assert "CheckViolation" in str(exception)
    outbox.assert_exact()


def test_without_transaction_id_host_and_user_stand_for_the_transaction(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    with outbox.conn.transaction():
        for user, amount in ((1, 1), (1, -1), (2, 3)):
            outbox.conn.execute(
                "insert into outbox_message_t (host_id, user_id, event_type, payload) "
                "values (%s, %s, 'order.placed', jsonb_build_object('amount', %s::int))",
                (host(1), host(user), amount),
            )
    outbox.drain(outbox.settings(engine), session)
    assert outbox.column("select amount from projection") == [3]
    assert [dead_letter[0] for dead_letter in dead(outbox)] == [None, None]
    outbox.assert_exact()


def test_many_failing_transactions_among_many(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    bad = set()
    for number in range(200):
        amount = -1 if number % 7 == 0 else number
        transaction = outbox.publish(host(number % 5), event(amount), event(1))
        if amount < 0:
            bad.add(transaction)
    outbox.drain(outbox.settings(engine), session)
    assert {dead_letter[0] for dead_letter in dead(outbox)} == bad
    assert outbox.value("select count(*) from projection") == 2 * (200 - len(bad))
    outbox.assert_exact()


def test_a_transaction_over_hosts_of_several_partitions_is_atomic(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    transaction = uuid.uuid4()
    outbox.publish(host(1), event(1))
    with outbox.conn.transaction():
        for number in range(20):
            outbox.publish(
                host(number), event(-1 if number == 13 else 1), transaction_id=transaction
            )
    outbox.publish(host(5), event(1))
    outbox.drain(outbox.settings(engine), session)
    assert len(dead(outbox)) == 20
    assert outbox.value("select count(*) from projection") == 2
    outbox.assert_exact()


def test_deferred_constraints_blame_the_right_transaction(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    outbox.conn.execute(
        "create table parent (amount numeric primary key);"
        "insert into parent select generate_series(1, 5);"
        "alter table projection add foreign key (amount) references parent deferrable initially deferred"
    )
    good = [outbox.publish(host(1), event(n)) for n in (1, 2)]
    bad = outbox.publish(host(1), event(77))
    good.append(outbox.publish(host(1), event(3)))
    outbox.drain(outbox.settings(engine), session)
    assert outbox.column("select transaction_id from projection order by seq") == good
    assert [dead_letter[0] for dead_letter in dead(outbox)] == [bad]


def both_kinds(outbox: Outbox, engine: str) -> Settings:
    outbox.conn.execute(
        "create table totals (host_id uuid primary key, amount numeric check (amount < 100))"
    )
    return outbox.settings(
        engine,
        handlers={
            "projection": outbox.config()["handlers"]["projection"],
            "totals": {
                "type": "sql",
                "each": "batch",
                "statement": "insert into totals select host_id, sum((payload->>'amount')::numeric) from batch"
                " group by host_id on conflict (host_id) do update set amount = totals.amount + excluded.amount",
            },
        },
        routes=[{"handlers": ["projection", "totals"]}],
    )


def test_event_and_batch_handlers_commit_together(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    settings = both_kinds(outbox, engine)
    for number in range(30):
        outbox.publish(host(number % 3), event(1), event(2))
    outbox.drain(settings, session)
    assert outbox.column("select amount from totals") == [30, 30, 30]
    outbox.assert_exact()


def test_poison_in_a_batch_handler_is_found_and_takes_its_other_effects_along(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    settings = both_kinds(outbox, engine)
    for number in range(20):
        outbox.publish(host(1), event(500 if number == 11 else 2))
    outbox.drain(settings, session)
    assert outbox.column("select amount from totals") == [38]
    assert [dead_letter[1] for dead_letter in dead(outbox)] == ["totals"]
    outbox.assert_exact()


def test_text_survives_a_batch_relation(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    outbox.conn.execute(
        "create table texts (n bigserial, aggregate_id text, payload jsonb, metadata jsonb)"
    )
    settings = outbox.settings(
        engine,
        handlers={
            "texts": {
                "type": "sql",
                "each": "batch",
                "statement": "insert into texts (aggregate_id, payload, metadata)"
                " select aggregate_id, payload, metadata from batch",
            }
        },
        routes=[{"handlers": ["texts"]}],
    )
    texts = ["", "\\N", "a\tb\nc\rd", "back\\slash", "ünïcödé 🚚", "\\.", "null", "'\"%s"]
    for text in texts:
        outbox.publish(host(1), event(text, aggregate_id=text, metadata={"t": text}))
    outbox.drain(settings, session)
    assert outbox.column("select aggregate_id from texts order by n") == texts
    assert outbox.column("select payload->>'amount' from texts order by n") == texts
    assert outbox.column("select metadata->>'t' from texts order by n") == texts


PYTHON = {
    "handlers": {"python": {"type": "python", "callable": "tests.callables:record"}},
    "routes": [{"handlers": ["python"]}],
}


def test_a_python_handler_writes_in_the_same_transaction(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    outbox.publish(host(1), event(1), event(2))
    bad = outbox.publish(host(1), event(13), event(4))
    outbox.publish(host(2), event(5))
    outbox.drain(outbox.settings(engine, **PYTHON), session)
    assert sorted(outbox.column("select amount from projection")) == [1, 2, 5]
    dead_letters = dead(outbox)
    assert [dead_letter[0] for dead_letter in dead_letters] == [bad, bad]
    assert all(
        str(dead_letter[2]).startswith("ValueError: thirteen is not an amount\n")
        for dead_letter in dead_letters
    )
    outbox.assert_exact()


def test_a_serialization_failure_is_tried_again_and_dead_letters_nothing(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    # A sequence does not roll back, so it counts attempts.
    outbox.conn.execute(
        """
        create sequence attempts;
        create function fail_twice() returns trigger language plpgsql as $$
        begin
            if nextval('attempts') <= 2 then
                raise serialization_failure;
            end if;
            return new;
        end $$;
        create trigger fail_twice before insert on projection for each row execute function fail_twice()
        """
    )
    outbox.publish(host(1), event(1))
    with relaying(outbox.settings(engine), session):
        outbox.wait_handled()
    assert outbox.value("select last_value from attempts") == 3
    assert not dead(outbox)
    assert outbox.value("select count(*) from relay.deferred") == 0
    outbox.assert_exact()


@pytest.mark.parametrize(
    ("policy", "dead_letters", "applied"), [("dead_letter", 2, 1), ("ignore", 0, 2)]
)
def test_unrouted_events_follow_the_policy(
    outbox: Outbox,
    engine: str,
    session: Session | None,
    policy: str,
    dead_letters: int,
    applied: int,
) -> None:
    outbox.publish(host(1), event(1))
    outbox.publish(host(1), event(2), event(3, event_type="unheard.of"))
    settings = outbox.settings(
        engine,
        routes=[{"match": {"event_type": "order.*"}, "handlers": ["projection"]}],
        unrouted=policy,
    )
    outbox.drain(settings, session)
    assert outbox.value("select count(*) from projection") == applied
    assert [dead_letter[1:3] for dead_letter in dead(outbox)] == [
        (None, "NotRouted: no route matches the event_type 'unheard.of'")
    ] * dead_letters


def test_redelivery_is_recognised(outbox: Outbox, engine: str, session: Session | None) -> None:
    """The target remembers; a slot that forgot what was confirmed changes nothing."""
    outbox.conn.execute(
        "select pg_copy_logical_replication_slot(%s, %s)", (outbox.slot, f"{outbox.slot}_copy")
    )
    outbox.publish(host(1), event(1))
    outbox.publish(host(2), event(2))
    outbox.drain(outbox.settings(engine), session)
    source = {**outbox.config()["source"], "slot": f"{outbox.slot}_copy"}
    outbox.publish(host(1), event(3))
    outbox.slot = f"{outbox.slot}_copy"
    outbox.drain(outbox.settings(engine, source=source), session)
    assert outbox.column("select amount from projection order by amount") == [1, 2, 3]
    outbox.assert_exact()


def test_a_dead_letter_is_kept_even_where_the_target_cannot_hold_its_text(
    outbox: Outbox, narrow: str, engine: str, session: Session | None
) -> None:
    with Outbox(narrow) as target:
        target.conn.execute(PROJECTION)
        settings = outbox.settings(engine, target={"dsn": target.relay_dsn})
        outbox.install_again(settings)
        bad = outbox.publish(host(1), event("🚚", aggregate_id="né 🚚"))
        outbox.publish(host(1), event(1))
        outbox.drain(settings, session)
        assert target.column("select amount from projection") == [1]
        ((transaction, handler, _, payload),) = dead(target)
        assert (transaction, handler) == (bad, "projection")
        assert "\\U0001f69a" in str(payload)


AWKWARD = [
    "",
    "\\N",
    "\\.",
    "a\tb\nc\rd\\e",
    'quoted "text", and \u00e9\u4e2d\U0001f600',
    "\x01\x1f",
    "plain",
    None,
]


@pytest.mark.parametrize("few", [0, 10**9], ids=["called", "sent"])
def test_a_statement_for_each_event_gets_every_value_as_it_was(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    """The two ways of running it are one to the statement, which also sees what the ones before it have done."""
    monkeypatch.setattr(handlers_sql, "FEW_EVENTS", few)
    outbox.conn.execute(
        "create table seen (before bigint, id uuid, kind text, agg text, payload jsonb, lsn pg_lsn, at timestamptz)"
    )
    for number in range(60):
        outbox.publish(
            host(1),
            *(
                event(aggregate_id=text or "", payload={"text": text, "n": number})
                for text in AWKWARD
            ),
        )
    outbox.conn.execute(
        "insert into outbox_message_t (host_id, event_type, aggregate_id, payload)"
        " select %s, 'e', v, 'null' from unnest(%s::text[]) v",
        (host(1), AWKWARD),
    )
    outbox.drain(
        outbox.settings(
            handlers={
                "projection": {
                    "type": "sql",
                    "statement": "insert into seen select (select count(*) from seen), %(id)s, %(event_type)s,"
                    " %(aggregate_id)s, %(payload)s, %(commit_lsn)s, %(commit_ts)s where 100 %% 2 = 0",
                }
            }
        )
    )
    count = outbox.value("select count(*) from outbox_message_t")
    assert outbox.column("select before from seen order by before") == list(range(count))
    different = outbox.value(
        """
        select count(*) from outbox_message_t o full join seen s using (id)
         where (o.c_offset - (select min(c_offset) from outbox_message_t), o.event_type, o.aggregate_id, o.payload)
               is distinct from (s.before, s.kind, s.agg, s.payload) or s.lsn is null or s.at is null
        """
    )
    assert different == 0


def test_poison_among_many_events_of_a_statement_takes_only_its_transaction_along(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    outbox.fill(100, hosts=1)
    bad = outbox.publish(host(0), event(1), event(-1))
    outbox.fill(100, hosts=1)
    outbox.drain(outbox.settings(engine), session)
    assert {dead_letter[0] for dead_letter in dead(outbox)} == {bad}
    assert outbox.value("select count(*) from projection") == 1_000
    outbox.assert_exact()


def test_routes_split_transactions_between_handlers(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    """Some transactions go to one handler whole, some in part, and each handler keeps the order."""
    kinds = ["order.placed", "order.paid", "mail.sent"]
    for number in range(80):
        outbox.publish(
            host(number % 5),
            *(event(n, kinds[(number + n) % len(kinds)]) for n in range(number % 4 + 1)),
        )
    outbox.conn.execute("create table mail (id uuid, c_offset bigint, seq bigserial)")
    mail = {"type": "sql", "statement": "insert into mail values (%(id)s, %(c_offset)s)"}
    outbox.drain(
        outbox.settings(
            engine,
            handlers={**outbox.config()["handlers"], "mail": mail},
            routes=[
                {"match": {"event_type": "order.*"}, "handlers": ["projection"], "continue": True},
                {"match": {"event_type": ["mail.*", "order.paid"]}, "handlers": ["mail"]},
            ],
        ),
        session,
    )
    for table, wanted in (("projection", "order.%"), ("mail", "(mail.%|order.paid)")):
        assert outbox.column(f"select id from {table} order by c_offset") == outbox.column(
            "select id from outbox_message_t where event_type similar to %s order by c_offset",
            (wanted,),
        )
    assert not dead(outbox)


def test_a_target_that_forgets_its_session_stops_relay(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection through PgBouncer's transaction pooling is an outage: no event is dead-lettered."""
    monkeypatch.setattr(relation, "create", lambda conn, types: None)
    outbox.fill(30)
    with pytest.raises(ConfigurationError, match="pooler"), relaying(outbox.settings()):
        wait_until(lambda: "relay" not in {thread.name for thread in threading.enumerate()})
    assert not dead(outbox)


@pytest.mark.parametrize("each", ["event", "batch"])
def test_order_survives_rows_of_every_size_and_poison(
    outbox: Outbox, engine: str, session: Session | None, each: str
) -> None:
    """PostgreSQL stores a row where there is room: after the rows of a rolled back attempt, and after larger rows."""
    columns = "id, host_id, c_offset, amount"
    fields = "%(id)s, %(host_id)s, %(c_offset)s, (%(payload)s->>'amount')::numeric"
    statement = {
        "event": f"insert into projection ({columns}) values ({fields})",
        "batch": f"insert into projection ({columns})"
        " select id, host_id, c_offset, (payload->>'amount')::numeric from batch",
    }[each]
    bad = set()
    for number in range(300):
        amount = -1 if number % 97 == 50 else number
        size = 6_000 if number % 3 == 0 else 10
        transaction = outbox.publish(
            host(1), *(event(payload={"amount": amount, "x": "y" * size, "n": n}) for n in range(3))
        )
        if amount < 0:
            bad.add(transaction)
    handlers = {"projection": {"type": "sql", "each": each, "statement": statement}}
    outbox.conn.execute("alter table outbox_message_t alter payload set storage plain")
    outbox.drain(outbox.settings(engine, handlers=handlers), session)
    assert {dead_letter[0] for dead_letter in dead(outbox)} == bad
    assert outbox.value("select count(*) from projection") == 3 * (300 - len(bad))
    found = outbox.column("select c_offset from projection order by seq")
    assert found == sorted(found)


def held() -> Counter[str]:
    """How many objects there are of each kind that hold a batch, here or in the JVM."""
    objects = gc.get_objects()
    frames = sum(is_frame(each) for each in objects if type(each) is JavaObject)
    names = Counter(type(each).__name__ for each in objects)
    return Counter(Batch=names["Batch"], Transactions=names["Transactions"], frames=frames)


def is_frame(reference: Any) -> bool:
    """Whether the JVM holds this object for Python, and it is a data frame, by the methods that were called."""
    client, name = reference._gateway_client, reference._target_id
    held = f"{client.address}{client.port}{name}" in ThreadSafeFinalizer.finalizers
    return held and not reference._methods.keys().isdisjoint(("mapInArrow", "collectToPython"))


@pytest.mark.parametrize("mode", ["wal", pytest.param("poll", marks=pytest.mark.rare)])
def test_small_batches_leave_nothing_for_the_collector(outbox: Outbox, mode: str) -> None:
    # At hundreds of batches a second it would soon have much to look at, and nothing goes on meanwhile.
    batches = 50
    gc.collect()
    gc.disable()
    try:
        source = {**outbox.config()["source"], "mode": mode}
        with relaying(outbox.settings("inline", source=source)):
            outbox.publish(host(1), event(1))
            outbox.wait_handled()
            gc.collect()
            left = []
            # What another part begins with, such as retention a second later, is left once.
            for _ in range(2):
                for number in range(batches):
                    outbox.publish(host(number % 3), event(1))
                    outbox.wait_handled()
                left.append(gc.collect())
            assert min(left) < batches
    finally:
        gc.enable()


def test_a_batch_is_let_go_when_it_is_done(
    outbox: Outbox, engine: str, session: Session | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The collector looks seldom, so nothing large may wait for it. That of another job keeps what is in use then.
    gc.collect()
    gc.disable()
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)
    try:
        with relaying(outbox.settings(engine), session):
            outbox.publish(host(1), event(1))
            outbox.wait_handled()
            before = held()
            for number in range(20):
                outbox.publish(host(number), event(1))
                outbox.wait_handled()
            # The last batch may be let go after its transactions are seen to be handled.
            wait_until(lambda: held() - before < Counter(Batch=5, Transactions=15, frames=3))
    finally:
        gc.enable()
    outbox.assert_exact()
