"""What an event costs for thousands of subscribers: from its publication until all that it is for have got it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from bench.outbox import Outbox
from bench.plan import Plan
from bench.results import Contender, Goal, Measurement, Workload

ONE = "1 subscriber"
COST = "ms/event"
_PUBLISH = """
    select relay.publish('00000000-0000-4000-8000-000000000000', null, jsonb_build_array(jsonb_build_object(
        'event_type', 'order.placed', 'aggregate_type', 'Order', 'aggregate_id', %(n)s::text,
        'payload', jsonb_build_object('customer', 'c' || %(n)s::int %% %(subscribers)s, 'amount', %(n)s::int %% 1000))))
"""
_TEXTS = """
    select relay.declare_subscriber('hub', 's' || n, jsonb_build_object('payload.customer', 'c' || n))
      from generate_series(0, %s - 1) as n
"""
_WHOLE = """
    select relay.declare_subscriber('hub', 's' || n, '{}', '$.payload.amount >= $least',
                                    jsonb_build_object('least', 999 - n %% 2))
      from generate_series(0, %s - 1) as n
"""
_READERS = """
    select relay.declare_reader('r' || n, jsonb_build_object('payload.customer', 'c' || n))
      from generate_series(0, %s - 1) as n
"""
_READ = """
    with page as materialized (select position, id from relay.read('hub')),
         got as materialized (
             select count(*) as n from relay.subscribers_of('hub', array(select id from page where id is not null))),
         moved as materialized (
             select relay.advance('hub', p.position) from (select distinct position from page) as p)
    select got.n, (select count(*) from moved) from got
"""
_READ_EACH = """
    select count(r.id), count(relay.advance('r' || n, r.position))
      from generate_series(0, %s - 1) as n cross join lateral relay.read('r' || n) as r
"""


def many(plan: Plan) -> Iterator[Workload]:
    """One event after the other, each for one of the subscribers of a reader, or read by each of as many readers."""
    outbox = Outbox(plan.cluster, "readers_many")
    events = 20 if plan.quick else 300
    counts = (1, 1_000) if plan.quick else (1, 1_000, 10_000)
    rows = [
        *((_name(each, "subscriber"), _TEXTS, each, events) for each in counts),
        (f"{counts[-1]:,} subscribers, params compared", _WHOLE, counts[-1], max(1, events // 20)),
        *((_name(each, "reader"), _READERS, each, max(2, events // each)) for each in counts),
    ]
    yield Workload(
        "readers-many",
        "one event a transaction, published, read and advanced past",
        [
            Contender(name, partial(measure, outbox, declare, count, often), plan.rounds, ONE)
            for name, declare, count, often in rows
        ],
        [Goal(_name(each, "subscriber"), COST, 1.5, of=ONE) for each in counts[1:]],
    )


def measure(outbox: Outbox, declare: str, count: int, events: int) -> Measurement:
    """The milliseconds that an event takes until each of so many readers, or the one of the subscribers, is past it."""
    conn = outbox.conn
    conn.execute("truncate outbox_message_t")
    conn.execute("select relay.drop_reader(name) from relay.log_readers")
    if declare != _READERS:
        conn.execute("select relay.declare_reader('hub')")
    conn.execute(declare.encode(), (count,))
    conn.execute("vacuum analyze relay.log_subscribers, relay.log_readers, relay.log_positions")
    read, parameters = (_READ_EACH, (count,)) if declare == _READERS else (_READ, ())
    took: list[float] = []
    for number in range(events + 1):
        begun = time.perf_counter()
        conn.execute(_PUBLISH.encode(), {"n": number, "subscribers": count})
        got = conn.execute(read.encode(), parameters).fetchone()
        took.append(time.perf_counter() - begun)
        if declare != _WHOLE and (got is None or got[0] != 1):
            raise AssertionError(f"event {number} went to {got} instead of one subscriber")
    # The first plans statements.
    return {COST: sum(took[1:]) / events * 1e3}


def _name(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
