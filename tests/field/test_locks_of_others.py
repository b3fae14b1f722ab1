"""Who may only log in keeps no advisory lock from relay where an administrator has done what docs/security.md says.

commandprompt/pgcolumnar#430: locks of a program are in the key space of everybody, who takes the same lock with
pg_advisory_lock. AppFlowy-IO/AppFlowy-Cloud#690, dbos-inc/dbos-transact-py#637: what waits for one stands still.
"""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.outbox import Outbox, event, host, relaying
from tests.roles import Role

_PAGE = Path(__file__).parents[2] / "docs/security.md"
_TAKEN = """
    select format('select %%s(%%s)', p.proname, array_to_string(array_fill('1'::text, array[p.pronargs]), ', '))
      from pg_proc as p
     where p.pronamespace = 'pg_catalog'::regnamespace and p.proname ~ '^pg_(try_)?advisory_' and p.proname !~ 'unlock'
       and p.pronargs = 2
"""
"""A call of each function of PostgreSQL that takes a lock by two numbers, as all of relay's have."""


@pytest.fixture
def closed(outbox: Outbox) -> Outbox:
    """A database whose administrator has followed the page."""
    (statements,) = re.findall(
        r"```sql\n(revoke execute on function.+?)```", _PAGE.read_text(), re.S
    )
    outbox.conn.execute(statements.encode())
    return outbox


@pytest.mark.parametrize("role", [Role.PUBLISHER, Role.WORKER, Role.READER])
def test_no_other_role_takes_a_lock_of_relay(closed: Outbox, role: Role) -> None:
    """The page left out the functions that take one for a transaction, by which a publisher held what it liked."""
    calls = closed.column(_TAKEN)
    assert len(calls) == 8
    for each in calls:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            closed.login(role).execute(each.encode())


def test_everybody_works_without_them(closed: Outbox) -> None:
    """The page gave the functions to relay alone: nobody could enqueue, watch a queue or the log, or claim a reader."""
    worker, reader = closed.worker, closed.reader
    worker.execute("select relay.declare_queue('q', '{}', key => 'host', keep_done => '1 hour')")
    reader.execute("select relay.declare_reader('r')")
    reader.execute("select relay.declare_reader('shared', lanes => 2)")
    with relaying(closed.settings()):
        closed.publish(host(1), event(1), event(2))
        closed.wait_handled()
    assert worker.value("select relay.watch_queue('q')").startswith("relay_queue_")
    worker.execute("select relay.enqueue('q', %s, host_id => 'h')", (Jsonb({"direct": True}),))
    assert len(worker.column("select id from relay.take('q', 10)")) == 2
    (lease,) = worker.execute("select id, attempt from relay.lease('q')").fetchall()
    worker.execute("select relay.retry('q', %s, %s)", lease)
    assert reader.value("select relay.claim_reader('r')") is not None
    assert reader.value("select relay.watch_log()")
    assert reader.column("select lane from relay.share_lanes('shared')")
    (position,) = reader.column("select distinct position from relay.read('r')")
    reader.execute("select relay.advance('r', %s)", (position,))
