"""Reports of filters and of shared subscriptions: Electric, KurrentDB, Eventuous, Axon, Marten, Kafka.

Each test names the report. What it describes is done to the conditions of readers, to subscribers and to lanes: a
filter that fails harms nobody, is never ignored in silence, and costs what it says.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from threading import Thread
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.client.reader import ReaderError, ReaderMoved, ReadTransaction, subscribe
from tests.outbox import Outbox, wait_until

_HOST = uuid.uuid4()
_Connection = psycopg.Connection[Any]


def _publish(conn: _Connection, *payloads: object, event_type: str = "order.placed") -> None:
    events = [
        {"event_type": event_type, "aggregate_type": "Order", "aggregate_id": "1", "payload": each}
        for each in payloads
    ]
    conn.execute("select relay.publish(%s, null, %s)", (_HOST, Jsonb(events)))


def _declare(conn: _Connection, where: str | None, params: object = None, **more: Any) -> None:
    conn.execute(
        "select relay.declare_reader('r', %s, 'now', \"where\" => %s, params => %s)",
        (Jsonb(more.get("match", {})), where, None if params is None else Jsonb(params)),
    )


def _satisfying(
    outbox: Outbox, where: str, *payloads: dict[str, Any], params: object = None
) -> list[Any]:
    """The payloads that a reader with the condition gets."""
    _declare(outbox.reader, where, params)
    if payloads:
        _publish(outbox.publisher, *payloads)
    return [
        payload
        for number, payload in outbox.reader.execute(
            "select id, payload from relay.read('r')"
        ).fetchall()
        if number is not None
    ]


def test_or_is_true_although_one_side_is_unknown(outbox: Outbox) -> None:
    """electric-sql/electric#2847: OR with a null side was null, and clients saw rows deleted."""
    one, other, both = {"a": None, "b": 1}, {"b": 1}, {"a": "x", "b": None}
    found = _satisfying(
        outbox, '$.payload.a == "x" || $.payload.b == 1', one, other, both, {"b": 2}
    )
    assert found == [one, other, both]


def test_a_field_that_is_null_is_no_error(outbox: Outbox) -> None:
    """electric-sql/electric#2483: a null where the condition had an array raised, and made all others slow."""
    assert _satisfying(outbox, "$.payload.tags[*] == 1", {"tags": None}, {}, {"tags": [2, 1]}) == [
        {"tags": [2, 1]}
    ]


def test_numbers_are_equal_as_they_are_greater(outbox: Outbox) -> None:
    """redpanda-data/connect#1828: json_path compared a number with == and found nothing, with > it found it."""
    items: list[dict[str, Any]] = [{"body": [{"type": 1}]}, {"body": [{"type": 2}]}]
    assert _satisfying(outbox, "$.payload.body[*] ? (@.type == 1)", *items) == items[:1]
    assert _satisfying(outbox, "exists ($.payload.body[*] ? (@.type > 1))") == items[1:]


def test_a_text_is_no_number(outbox: Outbox) -> None:
    """apache/pinot#10360: JSON_MATCH ignored the type of the value, so "1" was 1."""
    number, words = {"key": 1}, {"key": "1"}
    assert _satisfying(outbox, "$.payload.key == $x", number, words, params={"x": "1"}) == [words]
    assert _satisfying(outbox, "$.payload.key == $x", params={"x": 1}) == [number]


def test_a_value_of_another_type_does_not_match(outbox: Outbox) -> None:
    """sourcenetwork/defradb#3144: a filter on numbers failed the query at the first text."""
    payloads: list[dict[str, Any]] = [{"n": "ten"}, {"n": [1]}, {"n": {}}, {"n": True}, {"n": 11}]
    assert _satisfying(outbox, "$.payload.n > 10", *payloads) == [{"n": 11}]
    assert len(_satisfying(outbox, "strict $.payload.n > 10")) == 1


def test_a_reader_moves_past_what_does_not_match(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eventuous/eventuous#559: the checkpoint of a filter without matches never moved: each start scanned all."""
    monkeypatch.setattr("relay.client.claimed_reader._NOTE_SECONDS", 0.0)
    reader = subscribe(
        outbox.reader_dsn, "r", where="$.payload.n == 1", start="beginning", poll=0.02
    )

    def work() -> None:
        for transaction in reader:
            transaction.done()
            reader.stop()

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        moves = "select count(*) from relay.log_positions"
        # What declares and claims it moves it, too.
        wait_until(lambda: outbox.value(moves) >= 2)
        for number in range(2, 40):
            _publish(outbox.publisher, {"n": number})
        wait_until(lambda: outbox.value(moves) >= 3)
        _publish(outbox.publisher, {"n": 1})
        thread.join(60)
        assert not thread.is_alive()
    finally:
        reader.stop()


def test_a_page_without_matches_hides_no_event_that_comes_later(outbox: Outbox) -> None:
    """kurrent-io/KurrentDB#4975: the checkpoint after an empty page was that of an event that had not been read."""
    _declare(outbox.reader, "$.payload.n == 1")
    with psycopg.connect(outbox.publisher_dsn) as late:
        _publish(late, {"n": 1})
        _publish(outbox.publisher, {"n": 2})
        ((position, found),) = outbox.reader.execute(
            "select position, id from relay.read('r')"
        ).fetchall()
        assert found is None
        outbox.reader.execute("select relay.advance('r', %s)", (position,))
        late.commit()
    assert outbox.reader.column("select payload->>'n' from relay.read('r')") == ["1"]


NO_FILTER: list[tuple[dict[str, Any], str | None, object]] = [
    # jackmusick/bifrost#652: a JSONPath was stored and shown, and every event went to the target all the same.
    ({}, "$.payload.priority == 'high'", None),
    # holon-run/agentinbox#252: a filter of an unknown form matched every event in silence.
    ({"repositories": ["a/b"]}, None, None),
    # floci-io/floci-gcp#103: filters that could not be parsed were accepted, and ignored.
    ({}, "attributes.name = ", None),
    # allegro/hermes#860: a filter that had no effect on the topic was accepted.
    ({}, "$.payload.n > $least", {}),
    # message-db/message-db#18: a condition in SQL had to be switched off, for it may be anything.
    ({}, "payload->>'time' >= current_time); drop table outbox_message_t; --", None),
]


def test_a_filter_that_would_have_no_effect_is_refused(
    outbox: Outbox, subtests: pytest.Subtests
) -> None:
    for match, where, params in NO_FILTER:
        with subtests.test(f"{match} {where}"):
            with pytest.raises(
                psycopg.errors.InvalidParameterValue, match=r"^relay\.declare_reader: "
            ):
                _declare(outbox.reader, where, params, match=match)
            outbox.reader.execute("select relay.declare_reader('other')")
            with pytest.raises(psycopg.errors.InvalidParameterValue, match=r"^relay\.declare_"):
                outbox.reader.execute(
                    "select relay.declare_subscriber('other', 's', %s, %s, %s)",
                    (Jsonb(match), where, None if params is None else Jsonb(params)),
                )
            assert outbox.column("select name from relay.log_readers") == ["other"]


def test_values_of_params_are_no_part_of_the_path(outbox: Outbox) -> None:
    """message-db/message-db#18 again: what a subscriber gives as a value cannot widen what it gets."""
    value = '" || true || "'
    assert _satisfying(
        outbox, "$.payload.n == $x", {"n": 1}, {"n": value}, params={"x": value}
    ) == [{"n": value}]


def test_a_subscriber_of_thousands_costs_no_evaluation(outbox: Outbox) -> None:
    """electric-sql/electric#2040, #2319: each of 4,600 shapes of one form was evaluated for each change."""
    conn = outbox.reader
    conn.execute("select relay.declare_reader('r')")
    conn.execute(
        "select relay.declare_subscriber('r', 's' || n, jsonb_build_object('payload.id', 'n' || n))"
        " from generate_series(1, 5000) as n"
    )
    _publish(outbox.publisher, *({"id": f"n{number}"} for number in range(1, 101)))
    ids = outbox.column("select id from outbox_message_t")
    begun = time.monotonic()
    found = conn.execute("select * from relay.subscribers_of('r', %s)", (ids,)).fetchall()
    took = time.monotonic() - begun
    assert sorted(name for _, name in found) == sorted(f"s{number}" for number in range(1, 101))
    # A scan of the subscribers for each event would take a hundred times as long as what is allowed here.
    plan = "\n".join(
        outbox.column(
            "explain select from relay.log_subscribers where condition_id = 1 and texts = array['n1']"
        )
    )
    assert "log_subscribers_texts" in plan
    assert took < 30


def test_dropping_a_subscriber_does_not_look_at_the_others(outbox: Outbox) -> None:
    """electric-sql/electric#3160: removing a shape walked over all others, and held replication back for seconds."""
    conn = outbox.reader
    conn.execute("select relay.declare_reader('r')")
    conn.execute(
        "select relay.declare_subscriber('r', 's' || n) from generate_series(1, 2000) as n"
    )
    outbox.conn.execute("analyze relay.log_subscribers")
    plan = "\n".join(
        outbox.column("explain delete from relay.log_subscribers where reader = 1 and name = 's1'")
    )
    assert "log_subscribers_pkey" in plan
    assert outbox.reader.value("select relay.drop_subscriber('r', 's17')")
    assert outbox.value("select count(*) from relay.log_subscribers") == 1999


def _work(
    outbox: Outbox, handle: Callable[[ReadTransaction], None], ended: list[Any], **options: Any
) -> Thread:
    reader: Any = subscribe(
        outbox.reader_dsn, "r", lanes=4, start="beginning", **{"poll": 0.05, **options}
    )
    ended.append(reader)

    def work() -> None:
        with closing(iter(reader)) as transactions:
            for transaction in transactions:
                handle(transaction)

    thread = Thread(target=work, daemon=True)
    thread.start()
    return thread


def _publish_to_hosts(conn: _Connection, numbers: range) -> None:
    for number in numbers:
        event = {
            "event_type": "e",
            "aggregate_type": "O",
            "aggregate_id": "1",
            "payload": {"n": number},
        }
        conn.execute(
            "select relay.publish(%s, null, %s)", (uuid.UUID(int=number % 16), Jsonb([event]))
        )


def test_what_is_in_flight_when_a_lane_is_taken_has_its_effect_once(outbox: Outbox) -> None:
    """confluentinc/parallel-consumer#777: what was in progress when its partition was revoked was processed twice.

    mailgun/kafka-pixy#62: a partition was released before the last offset was committed. plecto/motorway#46: after a
    rebalance one partition stood still.
    """
    outbox.conn.execute("create table effects (n int)")
    _publish_to_hosts(outbox.publisher, range(48))
    readers: list[Any] = []

    def handle(transaction: ReadTransaction) -> None:
        with (
            psycopg.connect(outbox.reader_dsn, autocommit=True) as conn,
            suppress(ReaderMoved),
            conn.transaction(),
            transaction.commit(conn),
        ):
            for event in transaction.events:
                conn.execute("insert into effects values (%s)", (event.payload["n"],))

    # The first gives lanes back while it has transactions in flight, to one after the other.
    threads = [_work(outbox, handle, readers)]
    for _ in range(2):
        wait_until(lambda: outbox.value("select count(*) from effects") > 0)
        threads.append(_work(outbox, handle, readers))
    wait_until(lambda: outbox.value("select count(*) from effects") >= 48)
    _publish_to_hosts(outbox.publisher, range(48, 96))
    wait_until(lambda: outbox.value("select count(*) from effects") >= 96)
    for reader, thread in zip(readers, threads, strict=True):
        reader.stop()
        thread.join(60)
    assert sorted(outbox.column("select n from effects")) == list(range(96))


def test_a_batch_over_lanes_of_which_one_was_taken_fails_for_that_one_only(outbox: Outbox) -> None:
    """akka/alpakka-kafka#750: the commit of a batch failed, since one of its partitions had been revoked meanwhile."""
    _publish_to_hosts(outbox.publisher, range(32))
    batch: list[ReadTransaction] = []
    reader: Any = subscribe(outbox.reader_dsn, "r", lanes=4, start="beginning", poll=0.05)
    with closing(iter(reader)) as transactions:
        while len({each.mark.log.name for each in batch}) < 4:
            batch.append(next(transactions))
        # As another process does once the lease has passed.
        taken = batch[0].mark.log.name
        outbox.reader.execute("select relay.seek(%s, 'beginning')", (taken,))
        last = {each.mark.log.name: each for each in batch}
        for lane, transaction in last.items():
            if lane == taken:
                with pytest.raises(ReaderMoved):
                    transaction.done()
            else:
                transaction.done()
        # The loop goes on.
        assert next(transactions).events
    moved = outbox.column(
        "select distinct r.name from relay.log_readers as r join relay.log_positions as p on p.reader = r.id"
        " where p.snapshot::text <> '3:3:' order by 1"
    )
    assert moved == sorted(set(last) - {taken})


def test_lanes_are_not_merged_in_silence(outbox: Outbox) -> None:
    """AxonIQ/AxonFramework#4808: merged segments delivered again what the further one had handled; nobody said so."""
    outbox.reader.execute("select relay.declare_reader('r', lanes => 4)")
    with pytest.raises(
        ReaderError, match="the reader 'r' has 4 lanes by host: to change that, drop it"
    ):
        next(iter(subscribe(outbox.reader_dsn, "r", lanes=2)))


def test_a_lane_has_one_reader(outbox: Outbox) -> None:
    """JasperFx/marten#4007: several daemons worked one projection, although each should have held its lock."""
    outbox.reader.execute("select relay.declare_reader('r', lanes => 2)")
    assert outbox.reader.value("select relay.claim_reader('r/1')") is not None
    with psycopg.connect(outbox.reader_dsn, autocommit=True) as other:
        assert other.execute("select relay.claim_reader('r/1')").fetchone() == (None,)
        assert other.execute("select relay.claim_reader('r/2')").fetchone() != (None,)
        lanes = other.execute(
            "select lane, pid, members from relay.share_lanes('r', true)"
        ).fetchall()
    assert [lane for lane, _, _ in lanes] == ["r/1", "r/2"]
    assert len({pid for _, pid, _ in lanes}) == 2
    assert {members for _, _, members in lanes} == {1}
