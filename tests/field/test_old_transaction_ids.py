"""A log whose rows were inserted by transactions that are further back than ids of 32 bits can tell.

Reports: electric-sql/electric#2217, estuary/connectors#1623, airbytehq/airbyte#25753 and apigee-labs/transicator#4 (an
id of 32 bits is compared with those of another epoch: what is older is taken for later, or is not found).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from tests.clusters import next_id
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.postgres import EmbeddedServer, start_server
from tests.webhook import Webhook


@pytest.fixture(scope="module")
def aged() -> Iterator[Outbox]:
    """An outbox with two events of a former epoch of transaction ids, of which one is for later, and a new one."""
    with start_server() as server:
        if not isinstance(server, EmbeddedServer) or not server.has("pg_resetwal"):
            pytest.skip("needs pg_resetwal beside the server")
        with Outbox(server.create_database("app")) as outbox:
            outbox.install()
            later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
            outbox.publish(host(1), event(1))
            outbox.publish(host(2), event(2, deliver_at=later))
            outbox.conn.execute("select pg_drop_replication_slot(%s)", (outbox.slot,))
            server.stop()
            subprocess.run(
                [server.cluster._bin / "pg_resetwal", "-e", "1", server.cluster.data],
                check=True,
                capture_output=True,
                **server.cluster._process_options(),
            )
            server.start()
            outbox.reconnect()
            assert next_id(outbox) > 1 << 32
            outbox.publish(host(3), event(3))
            yield outbox


def test_a_sink_and_a_queue_from_the_beginning_have_all_of_it(aged: Outbox) -> None:
    with Webhook() as webhook:
        hook = {"type": "http", "url": webhook.url, "start": "beginning"}
        settings = aged.settings(
            source={**aged.config()["source"], "mode": "poll"},
            # The first portion has old ids alone.
            poll={"batch_size": 2},
            handlers={**aged.config()["handlers"], "hook": hook},
            routes=[{"handlers": ["projection", "hook"]}],
        )
        deferred = "select count(*) from relay.deferred"
        filled = "select count(*) from relay.queue_fills where ended_at is not null"
        queued = "select event_id from relay.queue_items where queue = 'mail'"
        with relaying(settings):
            # The one for later, of the target and of the sink.
            wait_until(lambda: len(webhook.ids()) == 2 and aged.value(deferred) == 2)
            aged.worker.execute("select relay.declare_queue('mail', start => 'beginning')")
            wait_until(lambda: aged.value(filled) == 1)
            assert len(aged.column(queued)) == 2
            aged.conn.execute("update relay.deferred set retry_at = now()")
            wait_until(lambda: len(webhook.ids()) == 3 and len(aged.column(queued)) == 3)
    assert sorted(webhook.ids()) == sorted(aged.column("select id::text from outbox_message_t"))
    assert set(webhook.ids().values()) == {1}
