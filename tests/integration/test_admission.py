"""Instances of one group with different configurations: who may start, and who ends."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from relay.config.effects import Effects
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.service import Service
from relay.store import admission, presence
from relay.store.connections import connect
from tests.outbox import APPEND, Outbox, event, host, relaying, wait_until
from tests.process import relay, running

OTHER = {
    "projection": {"type": "sql", "statement": APPEND.replace("amount'", "amount' || '0'")},
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "CHECK_SECONDS", 0.05)


def configuration(outbox: Outbox) -> str | None:
    """The stored configuration; None before an instance has started."""
    found: list[str | None] = outbox.column("select configuration::text from relay.groups")
    return found[0] if found else None


@pytest.mark.parametrize("mode", ["auto", "poll"])
def test_another_configuration_is_refused_while_an_instance_runs(
    outbox: Outbox, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = {**outbox.config()["source"], "mode": mode}
    caplog.set_level(logging.INFO, "relay")
    with relaying(outbox.settings(source=source)):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        with pytest.raises(
            ConfigurationError, match=r"unrouted \(dead_letter, here ignore\)"
        ) as raised:
            Service(outbox.settings(source=source, unrouted="ignore")).run()
        assert "--accept-configuration" in str(raised.value)
        # What may differ does not matter.
        with relaying(outbox.settings(source=source, batch={"max_events": 7})):
            outbox.publish(host(1), event(2))
            outbox.wait_handled()
    assert "the group's configuration has changed" not in caplog.text
    with relaying(outbox.settings(source=source, unrouted="ignore")):
        outbox.publish(host(1), event(3))
        outbox.wait_handled()
    (changed,) = [vars(r) for r in caplog.records if "has changed" in r.getMessage()]
    assert changed["difference"] == "unrouted (dead_letter, here ignore)"
    outbox.assert_exact()


def test_an_accepted_configuration_ends_the_instances_that_have_the_former(outbox: Outbox) -> None:
    former, latter = outbox.settings(), outbox.settings(unrouted="ignore")
    with ExitStack() as stack:
        first = stack.enter_context(relaying(former))
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        with relaying(latter, accept_configuration=True):
            wait_until(lambda: first.error is not None)
            with pytest.raises(
                ConfigurationError,
                match="another instance has replaced the configuration of 'default'",
            ):
                stack.close()
            outbox.publish(host(1), event(2))
            outbox.wait_drained()
            # A standby with the former one cannot come back beside it.
            with pytest.raises(ConfigurationError, match="runs with another"):
                Service(former).run()
    outbox.assert_exact()


def test_of_two_that_start_at_once_only_one_runs(outbox: Outbox) -> None:
    """Neither has what is stored, and each sees the other's lock."""
    with relaying(outbox.settings()):
        wait_until(lambda: configuration(outbox) is not None)
    outbox.publish(host(1), event(1))
    # The end of the block raises what the one met that was not admitted, whichever that is.
    with (
        pytest.raises(ConfigurationError, match="runs with another configuration"),
        relaying(outbox.settings(unrouted="ignore")),
        relaying(outbox.settings(handlers=OTHER)),
    ):
        outbox.wait_handled()


def test_the_command_says_how_to_go_on(outbox: Outbox, tmp_path: Path) -> None:
    former = outbox.config_file(tmp_path / "former.yaml")
    latter = outbox.config_file(tmp_path / "latter.yaml", handlers=OTHER)
    with running(former) as first:
        first.wait_said("streaming")
        refused = relay("run", "--config", str(latter))
        assert refused.returncode == 2
        assert "handlers.projection.statement: give all instances the same" in refused.stderr
        found = json.loads(relay("check", "--config", str(latter), "--json").stdout)
        (finding,) = [each for each in found if each["subject"] == "configuration"]
        assert finding["level"] == "error"
        with running(latter, "--accept-configuration") as second:
            assert first.process.wait(30) == 2
            second.wait_said("streaming")
            assert second.said("the group's configuration has changed")
            outbox.publish(host(1), event(1))
            outbox.wait_drained()
            assert second.terminate() == 0
    assert outbox.value("select amount from projection") == 10


def test_nothing_secret_is_stored(outbox: Outbox) -> None:
    http: dict[str, Any] = {
        "type": "http",
        "url": "http://u:hunter2@127.0.0.1:1/",
        "headers": {"a": "hunter2"},
    }
    config = outbox.config(handlers={**outbox.config()["handlers"], "h": http})
    with relaying(Settings(**config)):
        wait_until(lambda: configuration(outbox) is not None)
    kept = configuration(outbox)
    assert kept is not None
    assert '"handlers.h.url": "http://127.0.0.1:1/"' in kept
    assert "hunter2" not in kept


def test_who_waits_for_the_lock_of_the_group_says_so(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    settings = outbox.settings()
    with presence.stopped(outbox.conn, settings.group) as free:
        assert free
        running = ExitStack()
        running.enter_context(relaying(settings))
        wait_until(lambda: any("waiting for a session" in r.getMessage() for r in caplog.records))
    outbox.publish(host(1), event(1))
    outbox.wait_handled()
    running.close()


def test_an_instance_waits_for_the_session_of_one_that_has_just_ended(outbox: Outbox) -> None:
    """The server may need a moment to see that a connection was closed, and holds its locks until then."""
    with relaying(outbox.settings()):
        outbox.wait_drained()
    former = Effects.of(outbox.settings())
    changed = outbox.settings(unrouted="ignore")
    with connect(outbox.relay_dsn) as ending:
        admission.hold(ending, "default", former)
        closing = Timer(0.5, ending.close)
        closing.start()
        with relaying(changed):
            outbox.publish(host(1), event(1))
            outbox.wait_drained()
        closing.join()
    assert outbox.value("select count(*) from projection") == 1
