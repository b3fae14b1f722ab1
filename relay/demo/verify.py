"""Compares the database with what the demo published. Each check counts violations of a promise, and can fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg.rows import dict_row

from relay.demo.shop import Poison
from relay.store.connections import Connection


@dataclass(frozen=True, slots=True)
class Check:
    """A promise and whether it was kept; `counts` has the counted violations."""

    promise: str
    kept: bool
    counts: str


_QUERIES: Mapping[str, str] = {
    "projection + dead letters = outbox": """
        with outcome as (
            select id from shop.projection union all select event_id::uuid from relay.dead_letter_queue
        ), counted as (
            select id, count(*) as times from outcome group by id
        )
        select count(*) filter (where c.times is null)                       as missing,
               count(*) filter (where o.id is not null and c.times > 1)      as twice,
               count(*) filter (where o.id is null)                          as foreign
          from public.outbox_message_t o full join counted c on c.id = o.id
    """,
    "events as they were published": """
        select (select count(*) from shop.projection p join public.outbox_message_t o using (id)
                 where (p.host_id, p.transaction_id, p.c_offset, p.event_type, p.amount) is distinct from
                       (o.host_id, o.transaction_id, o.c_offset, o.event_type, (o.payload ->> 'amount')::numeric))
                   as projected_otherwise,
               (select count(*) from relay.dead_letter_queue d join public.outbox_message_t o on o.id::text = d.event_id
                 where (d.host_id, d.user_id, d.transaction_id, d.c_offset, d.event_type, d.payload, d.metadata)
                       is distinct from
                       (o.host_id::text, o.user_id::text, o.transaction_id::text, o.c_offset, o.event_type,
                        o.payload, o.metadata))
                   as dead_lettered_otherwise
    """,
    # Without a transaction_id, a business transaction is the events of one user of a host in one commit.
    "business transactions whole": """
        with event as (
            select coalesce(o.transaction_id::text, concat_ws(' ', o.host_id, o.user_id, o.xmin)) as business,
                   p.id is not null as applied, pg_xact_commit_timestamp(p.xmin) as committed
              from public.outbox_message_t o left join shop.projection p using (id)
        ), business as (
            select count(*) filter (where applied) as applied, count(*) as events,
                   count(distinct committed) as commits
              from event group by business
        )
        select count(*) filter (where applied not in (0, events)) as torn,
               count(*) filter (where commits > 1)                as in_several_commits
          from business
    """,
    "order of every host": """
        select count(*) as after_a_later_one
          from (select o.c_offset < lag(o.c_offset) over (partition by o.host_id order by p.seq) as late
                  from shop.projection p join public.outbox_message_t o using (id)) as applied
         where late
    """,
    "totals = projection": """
        with wanted as (
            select o.host_id, (o.payload ->> 'customer')::int as customer, count(*) as orders, sum(p.amount) as amount
              from shop.projection p join public.outbox_message_t o using (id)
             where p.event_type = 'order.placed'
             group by 1, 2
        )
        select count(*) as differing
          from wanted w full join shop.customer_totals t using (host_id, customer)
         where (w.orders, w.amount) is distinct from (t.orders, t.amount)
    """,
    "offsets of the partitions": """
        with wanted as (
            select abs(hashtext(host_id::text)::bigint) % (select count(*) from relay.consumer_offsets) as partition_id,
                   max(c_offset) + 1 as next_offset
              from public.outbox_message_t group by 1
        )
        select count(*) as not_at_the_end
          from relay.consumer_offsets c left join wanted w using (partition_id)
         where c.next_offset <> coalesce(w.next_offset, 1)
    """,
}

_DEAD = """
    with expected as (
        select * from unnest(%s::text[], %s::text[], %s::text[]) as poison (event_id, handler, fault)
    ), found as (
        select event_id, handler, substring(exception from '^\\w+') as fault from relay.dead_letter_queue
    )
    select (select count(*) from (select * from expected except all select * from found) as x) as missing,
           (select count(*) from (select * from found except all select * from expected) as x) as unexpected
"""

_SLOT = """
    select confirmed_flush_lsn::text as confirmed, confirmed_flush_lsn >= %s::pg_lsn as at_the_end, active
      from pg_replication_slots where database = current_database()
"""


def verify(conn: Connection, poisons: Sequence[Poison], end: str) -> list[Check]:
    """Check every promise. `end` is an LSN after the last commit of the outbox."""
    expected = (
        [poison.event_id for poison in poisons],
        [poison.handler for poison in poisons],
        [poison.fault for poison in poisons],
    )
    return [
        *(_count(conn, promise, query) for promise, query in _QUERIES.items()),
        _count(conn, "dead letters = poison", _DEAD, expected),
        _slot(conn, end),
    ]


def _count(
    conn: Connection, promise: str, query: str, parameters: Sequence[Any] | None = None
) -> Check:
    """Run a query that counts violations of a promise, each kind in a column named after it."""
    with conn.cursor(row_factory=dict_row) as cursor:
        violations: dict[str, int] = next(cursor.execute(query.encode(), parameters))
    counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in violations.items())
    return Check(promise, not any(violations.values()), counts)


def _slot(conn: Connection, end: str) -> Check:
    with conn.cursor(row_factory=dict_row) as cursor:
        state = cursor.execute(_SLOT, (end,)).fetchone()
    promise = "slot confirmed to the end"
    if state is None:
        return Check(promise, False, "there is no slot")
    kept = state["at_the_end"] and not state["active"]
    active = ", still active" if state["active"] else ""
    return Check(promise, kept, f"{state['confirmed']}, end {end}{active}")
