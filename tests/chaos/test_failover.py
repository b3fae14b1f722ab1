"""The source fails over to a standby: with a synchronised slot the stream goes on, without one the gap is polled."""

from __future__ import annotations

import pytest

from relay.config import Settings
from tests.outbox import Outbox, relaying, wait_until
from tests.postgres import EmbeddedServer, start_server, start_standby

pytestmark = pytest.mark.chaos

PRIMARY = {"wal_log_hints": "on"}
STANDBY = {"hot_standby_feedback": "on", "primary_slot_name": "standby"}


def has_replayed(standby: Outbox, lsn: str) -> bool:
    """Whether the standby has come as far as a position of its primary."""
    return bool(standby.value("select pg_last_wal_replay_lsn() >= %s::pg_lsn", (lsn,)))


def slot_is_synchronised(source: Outbox, standby: Outbox) -> bool:
    """Try once: the standby takes the slot over when it has come as far as the slot, and the slot as far as it.

    The slot's oldest transaction moves on with the server's notes of the running ones, otherwise made every 15 s.
    """
    source.fill(1)
    source.conn.execute("select pg_log_standby_snapshot()")
    tip = source.tip()
    source.wait_drained()
    wait_until(lambda: has_replayed(standby, tip))
    standby.conn.execute("select pg_sync_replication_slots()")
    return bool(
        standby.column(
            "select 1 from pg_replication_slots where slot_name = 'app' and synced and not temporary"
        )
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("synchronised", [True, False])
def test_a_standby_is_promoted(outbox: Outbox, synchronised: bool) -> None:
    """The target is another server, as it must be to tell what the new primary has not seen."""
    with start_server(PRIMARY) as primary:
        if not isinstance(primary, EmbeddedServer):
            pytest.skip("needs pg_basebackup beside the server")
        with Outbox(primary.create_database("app")) as source:
            if synchronised and source.conn.info.server_version < 170000:
                pytest.skip("failover slots came with PostgreSQL 17")
            source.conn.execute("select pg_create_physical_replication_slot('standby', true)")
            with start_standby(primary, STANDBY) as standby:
                hosts = (
                    f"host=127.0.0.1,127.0.0.1 port={primary.cluster.port},{standby.cluster.port}"
                )
                settings = Settings(
                    **source.config(
                        source={
                            "dsn": f"{hosts} dbname=app user=postgres target_session_attrs=read-write",
                            "slot": "app",
                            "publication": "app",
                        },
                        target={"dsn": outbox.dsn},
                    )
                )
                source.install_again(settings)
                with relaying(settings):
                    source.fill(200)
                    wait_until(lambda: outbox.handled() == 1_000)
                    source.wait_drained()
                    with Outbox(standby.dsn("app")) as promoted:
                        if synchronised:
                            wait_until(lambda: slot_is_synchronised(source, promoted))
                        wait_until(lambda: has_replayed(promoted, source.tip()))
                        before = source.value("select count(*) from outbox_message_t")
                        wait_until(lambda: outbox.handled() == before)
                        primary.kill()
                        promoted.conn.execute("select pg_promote()")
                        promoted.fill(200)
                        wait_until(lambda: outbox.handled() == before + 1_000)
                        # Polling may have got them all before the WAL of the new primary could be had.
                        wait_until(lambda: outbox.value("select timeline from relay.groups") == 2)
                        promoted.fill(1)
                        wait_until(lambda: outbox.handled() == before + 1_005)
                        everything = promoted.column(
                            "select id from outbox_message_t order by c_offset"
                        )
    made_anew = outbox.value("select cardinality(slot_recreations) from relay.groups")
    assert made_anew == (0 if synchronised else 1)
    assert sorted(everything) == sorted(outbox.column("select id from projection"))
    assert not outbox.column(
        "select 1 from (select c_offset < lag(c_offset) over (partition by host_id order by seq) as overtaken"
        " from projection) as followed where overtaken"
    )
