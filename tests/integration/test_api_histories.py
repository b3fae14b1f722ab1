"""Pages and streams over HTTP of random histories: each event once, in order, wherever a client goes on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.api import Program, Source, new_token, served, settings_of
from tests.outbox import Outbox, event, host

_HOSTS = [host(1), host(2)]


def _publish_at_random(dsn: str, chance: random.Random, steps: int) -> None:
    """Transactions of several sessions, of very different sizes, with savepoints; some are rolled back."""
    sessions = [psycopg.connect(dsn) for _ in range(4)]
    number = 0
    for _ in range(steps):
        conn = chance.choice(sessions)
        if chance.random() < 0.4:
            chance.choice([conn.commit, conn.commit, conn.commit, conn.rollback])()
            continue
        count = chance.choice([1, 1, 1, 2, 5, 40, 400])
        is_undone = chance.random() < 0.2
        conn.execute("select 1")
        with suppress(ZeroDivisionError), conn.transaction():
            events = [event(number + each) for each in range(count)]
            conn.execute(
                "select relay.publish(%s, null, %s)", (chance.choice(_HOSTS), Jsonb(events))
            )
            if is_undone:
                raise ZeroDivisionError
        number += count
    for each in sessions:
        each.commit()
        each.close()


def _committed(outbox: Outbox, host_id: UUID | None = None) -> list[str]:
    """The ids, of all hosts or of one, in the order of the log: of transactions by their last insert."""
    rows = outbox.conn.execute(
        "select id::text from (select *, max(c_offset) over (partition by c_xid) as last from outbox_message_t) as o"
        " where %(host)s::uuid is null or host_id = %(host)s order by last, c_offset",
        {"host": host_id},
    )
    return [row[0] for row in rows]


def _ids(events: list[Any]) -> list[str]:
    return [each["id"] for each in events]


def _pages(
    reader: Program, after: str, limits: Callable[[], int], **query: Any
) -> Iterator[tuple[list[str], str]]:
    """The ids of each page, and the position after it, up to the end."""
    while True:
        limit = limits()
        page = reader.get("/events", after=after, limit=limit, **query)
        assert len(page["events"]) <= limit
        after = page["next"]
        yield _ids(page["events"]), after
        if not page["more"]:
            return


@pytest.mark.parametrize("seed", range(2))
def test_pages_of_random_sizes_and_streams_from_every_position(outbox: Outbox, seed: int) -> None:
    chance = random.Random(seed)
    settings = settings_of(outbox)
    token = new_token(settings)
    _publish_at_random(outbox.publisher_dsn, chance, 120)
    wanted = _committed(outbox)
    of_host = set(_committed(outbox, _HOSTS[0]))
    with served(settings) as address:
        reader = Program(address, token)
        found: list[str] = []
        positions: list[tuple[str, int]] = []
        for ids, after in _pages(reader, "beginning", lambda: chance.choice([1, 2, 3, 50, 1000])):
            found += ids
            positions.append((after, len(found)))
        assert found == wanted
        for position, done in chance.sample(positions, min(8, len(positions))):
            pages = _pages(reader, position, lambda: 1000, host=str(_HOSTS[0]))
            rest = [each for ids, _ in pages for each in ids]
            assert rest == [each for each in wanted[done:] if each in of_host]
        # A stream that is cut after random numbers of events.
        last, streamed = positions[0][0], wanted[: positions[0][1]]
        while len(streamed) < len(wanted):
            with Source(address, token, last=last) as source:
                assert source.status == 200
                count = min(chance.choice([1, 2, 7, 100, 700]), len(wanted) - len(streamed))
                streamed += _ids(source.take(count))
                last = source.last
        assert streamed == wanted
