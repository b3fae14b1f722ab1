"""A publication FOR ALL TABLES, as Debezium makes one, refuses deletes from tables that have no replica identity."""

from __future__ import annotations

import psycopg
import pytest

from relay.admin.check import examine
from relay.admin.findings import Severity
from relay.retention.schedule import Schedule
from relay.store.connections import connect
from tests.outbox import Outbox, event, host, relaying


def test_queues_are_declared_and_retention_works_beside_a_publication_of_all_tables(
    outbox: Outbox,
) -> None:
    """timgit/pg-boss#387, Snowflake-Labs/pg_lake#170, fluentmigrator/fluentmigrator#1872."""
    outbox.conn.execute("create publication everything for all tables")
    for attempts in (3, 4, 5):
        outbox.worker.execute(
            "select relay.declare_queue('q', '{}', attempts => %s, keep_done => '1 hour')",
            (attempts,),
        )
    settings = outbox.settings()
    with relaying(settings):
        outbox.publish(host(1), event())
        outbox.wait_handled()
    retention = Schedule(settings, lambda: None)
    with connect(settings.source_dsn) as source, connect(settings.target_dsn) as target:
        retention.retain(source, target)
    assert retention.condition.fault is None
    assert outbox.value("select ready from relay.queue_figures") == 1
    outbox.assert_exact()


def test_check_names_a_publication_that_keeps_workers_from_taking(outbox: Outbox) -> None:
    """politics-rewired/Spoke#1009, bucardo/bucardo#268. What the finding says lets them take."""
    outbox.worker.execute("select relay.declare_queue('q', null); select relay.enqueue('q', '{}')")
    settings = outbox.settings()
    assert not [each for each in examine(settings) if "of all tables" in each.text]
    outbox.conn.execute("create publication everything for all tables")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        outbox.worker.execute("select relay.take('q')")
    (found,) = [each for each in examine(settings) if "of all tables" in each.text]
    assert found.level is Severity.WARNING
    outbox.conn.execute(found.text.split("`")[1].encode())
    assert not [each for each in examine(settings) if "of all tables" in each.text]
    assert outbox.worker.value("select count(*) from relay.take('q')") == 1
    outbox.worker.execute("select relay.drop_queue('q')")
