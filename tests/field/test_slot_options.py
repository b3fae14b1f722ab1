"""Somebody made the slot with options that relay does not decode."""

from __future__ import annotations

import pytest

from relay.admin.check import examine
from relay.admin.findings import Severity
from relay.faults import ConfigurationError
from relay.service import Service
from tests.outbox import Outbox


def test_a_slot_with_two_phase_is_refused_with_the_cure(outbox: Outbox) -> None:
    """pgoutput sends the PREPARE, whatever version the client asks for: npgsql/npgsql#4196, npgsql/npgsql#4213."""
    cure = f"drop the slot (select pg_drop_replication_slot('{outbox.slot}')) and run `relay init`"
    outbox.conn.execute("select pg_drop_replication_slot(%s)", (outbox.slot,))
    outbox.conn.execute(
        "select pg_create_logical_replication_slot(%s, 'pgoutput', false, true)", (outbox.slot,)
    )
    found = [each.text for each in examine(outbox.settings()) if each.level is Severity.ERROR]
    assert len(found) == 1
    assert found[0].endswith(cure)
    with pytest.raises(ConfigurationError, match="two_phase"):
        Service(outbox.settings()).run()
