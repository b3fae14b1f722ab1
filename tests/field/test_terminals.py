"""A terminal of an operator does nothing that is in the texts of others: types of events, names, faults.

marmot-protocol/mdk#993, eminwux/sbsh#390, jamie8johnson/cqs#1341, ahmadrosid/nakama#608: there was a
sanitizer for terminals, and some commands printed without. berthubert/trifecta#50: lines are forged.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.admin.findings import Finding, Severity
from relay.cli.install import _print_findings
from relay.cli.options import fail, warn
from tests.outbox import Outbox, event, host
from tests.process import relay

TITLE = "\x1b]0;owned\x07"
FORGED = f"a{TITLE}\nforged \u202e"


def _assert_harmless(printed: str, lines: int | None = None) -> None:
    assert "owned" in printed
    assert not {each for each in printed if not each.isprintable()} - {"\n", "\t"}
    assert not [each for each in printed.splitlines() if each.startswith("forged")]
    if lines is not None:
        assert len(printed.splitlines()) == lines


def test_an_event_and_what_it_caused(outbox: Outbox, tmp_path: Path) -> None:
    """`relay event` printed the type as it was: whoever may publish wrote to the terminal of who looks at the event."""
    config = outbox.config_file(tmp_path / "relay.yaml")
    outbox.publish(host(1), event(event_type=FORGED, aggregate_type=FORGED, aggregate_id=FORGED))
    published = str(outbox.value("select id from outbox_message_t"))
    result = relay("event", published, "--config", str(config))
    assert result.returncode == 0, result.stderr
    _assert_harmless(result.stdout)


def test_why_a_queue_is_stopped(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")
    outbox.worker.execute("select relay.declare_queue('q', '{}')")
    outbox.conn.execute("update relay.queues set stopped_at = now(), fault = %s", (FORGED,))
    result = relay("queue", "list", "--config", str(config))
    assert result.returncode == 0, result.stderr
    _assert_harmless(result.stdout)


def test_errors_warnings_and_findings(capsys: pytest.CaptureFixture[str]) -> None:
    """They quote names of objects that others have created, such as those that `relay init` refuses."""
    with pytest.raises(SystemExit):
        fail(f"the table {FORGED} is not relay's", 2)
    _assert_harmless(capsys.readouterr().err, 2)
    warn(f"the table {FORGED} is not relay's")
    _assert_harmless(capsys.readouterr().err, 1)
    for level in Severity:
        _print_findings([Finding(level, "schema", f"the table {FORGED} is not relay's")])
        printed = capsys.readouterr()
        _assert_harmless(printed.out + printed.err, 2)
