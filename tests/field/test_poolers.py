"""A pooler that lends a session to one client after the other: relay's settings would reach the others."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from relay.admin import check
from relay.admin.findings import Severity
from relay.faults import ConfigurationError
from relay.store.connections import connect, open_pool
from tests.outbox import Outbox, event, host, relaying
from tests.pgbouncer import pooled


def test_a_pooler_in_transaction_mode_is_refused_before_anything_is_set(outbox: Outbox) -> None:
    """pgbouncer/pgbouncer#1313, #452, #396, liquibase/liquibase#7092: other clients then found none of their tables."""
    with pooled(outbox.relay_dsn) as dsn:
        refusal = "the pooler to session mode"
        with pytest.raises(
            ConfigurationError, match=f"dsn: .* is a pooler that gives .* {refusal}"
        ):
            connect(dsn)
        source = outbox.config()["source"]
        through: dict[str, Any] = {
            "source": {
                "source": {**source, "dsn": dsn, "mode": "poll"},
                "target": {"dsn": outbox.relay_dsn},
            },
            # The lock of a sink's claim would stay in the pooler's session: nobody could claim the sink again.
            "target": {"target": {"dsn": dsn}},
        }
        for key, changed in through.items():
            found = check.examine(outbox.settings(**changed))
            texts = [each.text for each in found if each.level is Severity.ERROR]
            assert f"{key}.dsn: 127.0.0.1 is a pooler that gives" in texts[0]
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
        settings = outbox.settings(source=source, target={"dsn": dsn})
        with relaying(settings):
            outbox.publish(host(1), event(1))
            outbox.wait_handled()
    outbox.assert_exact()
