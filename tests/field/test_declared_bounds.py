"""What others declare is bounded when it is declared and when it is evaluated, and stops by itself, by name.

Reports of users of comparable systems are named where they are tried. Declarations are those of ordinary roles.
"""

from __future__ import annotations

import logging

import psycopg
import pytest

from relay.admin.queues import listed as queues_listed
from relay.admin.readers import listed as readers_listed
from relay.model import exact_json
from relay.model.json_fields import json_fields
from tests.outbox import Outbox, event, host, relaying

HUGE = '{"payload.x": 1e5000}'
"""Of 18 characters, 5,001 digits: more than the 4,300 that Python converts."""


@pytest.mark.parametrize(
    ("match", "why"),
    [
        # python/cpython#95778: int() of more than 4,300 digits raises, and who does not expect that ends.
        (HUGE, "250 digits"),
        ('{"payload.x": [1, 1e-300]}', "250 digits"),
        ('{"payload.x": "%s"}' % ("x" * 20_001), "20000 characters"),
    ],
)
@pytest.mark.parametrize("declare", ["declare_queue('q', ", "declare_reader('r', "])
def test_a_match_is_bounded_when_it_is_declared(
    outbox: Outbox, declare: str, match: str, why: str
) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=why):
        outbox.conn.execute(f"select relay.{declare}%s::jsonb)".encode(), (match,))


def test_a_subscriber_is_bounded_as_its_reader_is(outbox: Outbox) -> None:
    outbox.conn.execute("select relay.declare_reader('r')")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="250 digits"):
        outbox.conn.execute("select relay.declare_subscriber('r', 's', %s::jsonb)", (HUGE,))


def test_a_match_of_a_former_edition_that_cannot_be_read_stops_its_queue(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """python/cpython#95778: what a former edition let in ended relay at its first event, and at each start."""
    outbox.conn.execute("select relay.declare_queue('q', '{\"payload.x\": 1}')")
    outbox.conn.execute("select relay.declare_queue('other')")
    outbox.conn.execute("update relay.queues set match = %s::jsonb where name = 'q'", (HUGE,))
    outbox.conn.execute("update relay.queue_revisions set revision = revision + 1")
    with (
        outbox.limited_role() as (_, dsn),
        caplog.at_level(logging.ERROR),
        relaying(outbox.settings(target={"dsn": dsn})),
    ):
        for number in (1, 2):
            outbox.publish(host(number), event(number))
            outbox.wait_handled()
    outbox.assert_exact()
    assert [each.__dict__["queue"] for each in caplog.records if "is stopped" in each.message] == [
        "q"
    ]
    settings = outbox.settings()
    assert outbox.value("select count(*) from relay.queue_items where queue = 'other'") == 2
    by_name = {each.queue: each for each in queues_listed(settings)}
    assert by_name["q"].fault == "match: relay cannot read a value of it"
    assert by_name["other"].stopped_at is None
    # It goes on when it is declared otherwise.
    outbox.conn.execute("select relay.declare_queue('q')")
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
    assert outbox.value("select count(*) from relay.queue_items where queue = 'q'") == 1
    assert all(each.stopped_at is None for each in queues_listed(settings))


def test_a_reader_of_a_former_edition_with_a_long_number_is_listed(outbox: Outbox) -> None:
    """python/cpython#95778: `relay reader list` was a traceback for everybody."""
    outbox.conn.execute("select relay.declare_reader('r')")
    outbox.conn.execute("update relay.log_readers set match = %s::jsonb, params = match", (HUGE,))
    (found,) = readers_listed(outbox.settings())
    assert json_fields(found)["match"] == {"payload.x": "1" + "0" * 5000}
    assert exact_json.dumps(found.match, "match") == '{"payload.x": 1' + "0" * 5000 + "}"
