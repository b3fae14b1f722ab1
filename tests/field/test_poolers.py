"""A pooler that lends a session to one client after the other: relay's settings would reach the others."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from relay.admin import check
from relay.admin.findings import Severity
from relay.admin.install import initialise
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.store.connections import connect, open_pool
from tests.outbox import Outbox, event, host, relaying
from tests.pgbouncer import pooled


def errors(settings: Settings) -> list[str]:
    """What `relay check` refuses."""
    return [each.text for each in check.examine(settings) if each.level is Severity.ERROR]


def test_a_pooler_in_transaction_mode_is_refused_before_anything_is_set(outbox: Outbox) -> None:
    """pgbouncer/pgbouncer#1313, #452, #396, liquibase/liquibase#7092: other clients then found none of their tables.
    goauthentik/authentik#23876, pgbouncer/pgbouncer#102, pgdogdev/pgdog#1407, electric-sql/electric#2682,
    neondatabase/website#5482: locks stay behind in its sessions.
    """
    with pooled(outbox.relay_dsn) as dsn:
        refusal = "connect to PostgreSQL itself, or set the pooler to session mode"
        with pytest.raises(
            ConfigurationError, match=f"dsn: .* is a pooler that gives .* {refusal}"
        ):
            connect(dsn)
        source = {**outbox.config()["source"], "dsn": dsn}
        through: dict[str, list[dict[str, Any]]] = {
            "source": [
                {"source": source},
                {"source": {**source, "mode": "poll"}, "target": {"dsn": outbox.relay_dsn}},
            ],
            # The lock of a sink's claim would stay in the pooler's session: nobody could claim the sink again.
            "target": [{"target": {"dsn": dsn}}],
        }
        for key, settings in (
            (key, outbox.settings(**each)) for key, changed in through.items() for each in changed
        ):
            begins = f"{key}.dsn: 127.0.0.1 is a pooler that gives"
            with pytest.raises(ConfigurationError, match=f"{begins} .* {refusal}"):
                initialise(settings)
            assert errors(settings)[0].startswith(begins)
            assert errors(settings)[0].endswith(refusal)
        with psycopg.connect(dsn) as other:
            assert other.execute("show search_path").fetchone() == ('"$user", public',)


@pytest.mark.parametrize("size", [1, 20])
def test_a_pooler_in_session_mode_is_used(outbox: Outbox, size: int) -> None:
    """zalando/postgres-operator#984, pgbouncer/pgbouncer#1074, #674: it refuses settings as startup parameters."""
    with pooled(outbox.relay_dsn, "session", size) as dsn:
        with connect(dsn) as conn:
            assert conn.execute("show search_path").fetchone() == ("pg_catalog, pg_temp",)
        with psycopg.connect(dsn) as other:
            assert other.execute("show search_path").fetchone() == ('"$user", public',)
        if size == 1:
            return
        with open_pool(dsn, 1) as pool, pool.connection() as conn:
            assert conn.execute("show lock_timeout").fetchone() == ("30s",)
        source = {**outbox.config()["source"], "dsn": dsn, "mode": "poll"}
        for settings in (
            outbox.settings(target={"dsn": dsn}),
            outbox.settings(source=source, target={"dsn": dsn}),
        ):
            assert errors(settings) == []
            outbox.publish(host(1), event(1))
            with relaying(settings):
                outbox.wait_handled()
    outbox.assert_exact()
