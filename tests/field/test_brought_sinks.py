"""What becomes of relay where a package brings a sink that does what it should not.

inventree/InvenTree#2308, openlibhums/janeway#3211: a plug-in that cannot be loaded takes the application with it.
apache/kafka#10549: of two plug-ins of one name any is used (tried in tests/unit/test_sink_types.py).
dask/distributed#5958, PyO3/pyo3#3918: a task that raises a BaseException is never over.
aio-libs/aiokafka#983, robinhood/faust#539: a task that nobody has cancelled ends as cancelled, in silence.
grpc/grpc#21819: a client that is closed cancels the calls of others.
logstash-plugins/logstash-input-http_poller#137, vatesfr/xen-orchestra#3665: plug-ins' credentials are shown.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from relay.admin import check
from relay.config.effects import Effects
from relay.delivery.dispatch import Dispatcher
from relay.faults import ConfigurationError
from relay.sinks import build_sinks
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.packages import install
from tests.unit.test_dispatch import Run, delivery
from tests.unit.test_sink_types import MODULE, loaded, pipes, refusal, site  # noqa: F401


class Panic(BaseException):
    """As that of a library in Rust."""


@pytest.mark.parametrize("raised", [asyncio.CancelledError, Panic, SystemExit, KeyboardInterrupt])
def test_a_delivery_that_ends_with_what_is_no_exception_is_tried_again(
    raised: type[BaseException],
) -> None:
    """It neither is in flight for ever, nor ends the loop of all sinks, nor takes other deliveries with it."""
    raising = [raised]

    async def behave(number: int) -> None:
        await asyncio.sleep(0.001)
        if number == 1 and raising:
            raise raising.pop()

    async def main() -> Run:
        retry = {"wait": 0.01, "jitter": 0, "defer_after": 5}
        found = Run(behave, circuit_breaker={"cool_down": 0.02}, retry=retry)
        await found.all([delivery(0, "a"), delivery(1, "b"), delivery(2, "b"), delivery(3, "c")])
        return found

    found = asyncio.run(main())
    assert sorted(found.sink.delivered) == [0, 1, 2, 3]
    assert found.order.index(1) < found.order.index(2)


def test_a_delivery_that_is_cancelled_by_relay_stays_cancelled() -> None:
    async def main() -> Run:
        found = Run(lambda _: asyncio.sleep(10))
        found.dispatcher.submit(delivery(0, "a"))
        await asyncio.sleep(0.01)
        await found.dispatcher.close()
        return found

    found = asyncio.run(main())
    assert not found.dispositions
    assert found.dispatcher.count == 1
    assert isinstance(found.dispatcher, Dispatcher)


REFUSED = [
    (
        MODULE.replace("from typing", "import sys\nsys.exit(0)\nfrom typing"),
        "….type: relay-pipe: relay_pipe cannot be imported: SystemExit: 0",
    ),
    (
        MODULE.replace("channel: Alike[str]", "channel: Alike[str]\n    retry: Own[int] = 3"),
        "….type: relay_pipe.Settings.retry: every sink has a key of this name, of another type: choose another name",
    ),
    (
        MODULE.replace("channel: Alike[str]", "channel: Alike[str]\n    timeout: Own[str] = '5s'"),
        "….type: relay_pipe.Settings.timeout: every sink has a key of this name, of another type: choose another name",
    ),
    (
        MODULE.replace("channel: Alike[str]", "channel: str"),
        "….type: relay_pipe.Settings.channel: annotate it with relay.sinks.Alike or relay.sinks.Own",
    ),
    (
        MODULE.replace(
            '    """Who may use it."""',
            "    @__import__('pydantic').model_validator(mode='after')\n    def _valid(self):\n"
            "        return {}[self.token.get_secret_value()]",
        ),
        "….type: relay_pipe.Settings raised KeyError",
    ),
]


@pytest.mark.parametrize(("source", "said"), REFUSED)
def test_settings_that_relay_would_misread_are_refused(
    site: Path,  # noqa: F811
    tmp_path: Path,
    source: str,
    said: str,
) -> None:
    install(site, "relay-pipe", {"pipe": "relay_pipe"}, {"relay_pipe": source})
    assert refusal(tmp_path, "{type: pipe, channel: a, token: hunter2}") == said


@pytest.mark.filterwarnings("ignore:Field name")
def test_a_key_with_the_name_of_what_relay_asks_settings_is_refused(
    site: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    source = MODULE.replace(
        "channel: Alike[str]", "channel: Alike[str]\n    templates: Own[str] = ''"
    )
    install(site, "relay-pipe", {"pipe": "relay_pipe"}, {"relay_pipe": source})
    assert refusal(tmp_path, "{type: pipe, channel: a}") == (
        "….type: relay_pipe.Settings.templates: relay's own class has this name: choose another one"
    )


def test_a_key_of_relay_may_be_narrower_and_have_another_default(
    site: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    keys = [
        "channel: Alike[str]",
        "timeout: Own[float] = 5.0",
        "concurrency: Own[int] = 1",
        "rate_limit: Own[float] = 3",
        "order_by: Alike[Literal['host', 'none']] = 'none'",
        "schema: Own[str] = 'public'",
    ]
    source = MODULE.replace("channel: Alike[str]", "\n    ".join(keys))
    install(site, "relay-pipe", {"pipe": "relay_pipe"}, {"relay_pipe": source})
    with pytest.warns(UserWarning, match="schema"):
        settings: Any = loaded(tmp_path, "{type: pipe, channel: a}").handlers["out"]
    assert (settings.timeout, settings.order_by, settings.rate_limit) == (5.0, "none", 3)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("return Pipe", "import sys; sys.exit(3); return Pipe", "sink has failed: SystemExit: 3"),
        ("return Pipe(", "return 1 / 0 or Pipe(", "sink has failed: ZeroDivisionError: division by zero"),
        ("return Pipe(name, settings)", "Pipe(name, settings)", "sink returned a NoneType without resume()"),
        ("async def deliver", "def deliver", "sink returned a Pipe: make deliver() an async def"),
        ("async def close", "async def shut", "sink returned a Pipe without close()"),
        (
            "self.name, self.channel = name",
            "self.name, self.channel = 'pipe'",
            "sink returned a sink with another name: it is the handler's, the first argument",
        ),
    ],
)  # fmt: skip
def test_what_is_no_sink_is_refused_when_it_is_built(
    site: Path,  # noqa: F811
    tmp_path: Path,
    old: str,
    new: str,
    said: str,
) -> None:
    """Otherwise each delivery would raise AttributeError or TypeError, and be a dead letter."""
    install(site, "relay-pipe", {"pipe": "relay_pipe"}, {"relay_pipe": MODULE.replace(old, new)})
    settings = loaded(tmp_path, "{type: pipe, channel: a}")
    with pytest.raises(ConfigurationError) as refused:
        build_sinks(settings.handlers)
    assert str(refused.value) == f"handlers.out: relay_pipe.{said}"


CLOSES_BADLY = """async def close(self):
        if self.used is {when}:
            raise AttributeError("no client")
"""


@pytest.mark.parametrize("when", [False, True])
def test_a_sink_that_cannot_be_closed_is_named_and_spoils_no_stop(
    outbox: Outbox,
    site: Path,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    when: bool,
) -> None:
    """One that opens its client with the first delivery often cannot be closed before it."""
    source = MODULE.replace(
        "async def close(self):\n        pass\n", CLOSES_BADLY.format(when=when)
    )
    source = source.replace("self.name, ", "self.used = False\n        self.name, ", 1)
    source = source.replace(
        "deliver(self, transaction):\n        pass",
        "deliver(self, transaction):\n        self.used = True",
    )
    install(site, "relay-pipe", {"pipe": "relay_pipe"}, {"relay_pipe": source})
    config: dict[str, Any] = {
        "handlers": {"out": {"type": "pipe", "channel": "a"}},
        "routes": [{"handlers": ["out"]}],
    }
    settings = outbox.settings(**config)
    said = "handlers.out: the sink cannot be closed before it was used: AttributeError: no client"
    assert (said in [each.text for each in check.examine(settings)]) is not when
    if when:
        with caplog.at_level(logging.WARNING), relaying(settings):
            outbox.publish(host(1), event(1))
            wait_until(lambda: outbox.value("select sum(confirmed) from relay.sink_activity") == 1)
        assert "a sink has failed to close its connections" in caplog.text


def test_a_sink_that_does_not_end_its_close_is_named_by_check(
    site: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise `relay check`, and each start, would wait for ever."""
    source = MODULE.replace("close(self):\n        pass", "close(self):\n        await forever()")
    source += "\n\nasync def forever():\n    await __import__('asyncio').sleep(60)\n"
    install(site, "relay-pipe", {"pipe": "relay_pipe"}, {"relay_pipe": source})
    monkeypatch.setattr(check, "_CLOSING_SECONDS", 0.05)
    sinks = build_sinks(loaded(tmp_path, "{type: pipe, channel: a}").handlers)
    with pytest.raises(
        ConfigurationError, match=r"^handlers\.out: .* before it was used: TimeoutError"
    ):
        asyncio.run(check._close(sinks))


def test_a_sink_that_cannot_be_resumed_waits_until_it_can(
    outbox: Outbox,
    site: Path,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It ends neither relay nor the other sinks."""
    state = tmp_path / "series"
    source = MODULE.replace(
        "resume(self, series):\n        pass",
        f"resume(self, series):\n        open({str(state)!r})",
    )
    install(site, "relay-pipe", {"pipe": "relay_pipe"}, {"relay_pipe": source})
    config: dict[str, Any] = {
        "handlers": {
            "out": {"type": "pipe", "channel": "a"},
            "other": {"type": "function", "callable": "builtins:id"},
        },
        "routes": [{"handlers": ["out", "other"]}],
    }

    def delivered(sink: str) -> bool:
        query = f"select coalesce(sum(confirmed), 0) from relay.sink_activity where sink = '{sink}'"
        return bool(outbox.value(query) == 1)

    with relaying(outbox.settings(**config)):
        outbox.publish(host(1), event(1))
        wait_until(lambda: delivered("other"))
        (fault,) = [vars(each)["fault"] for each in caplog.records]
        assert fault.startswith(
            "Undelivered: the sink cannot be resumed: FileNotFoundError (relay_pipe.py:"
        )
        state.touch()
        wait_until(lambda: delivered("out"))


@pytest.mark.parametrize(
    ("key", "value", "stored"),
    [
        ("Alike[set[str]]", "[c, a, b]", '["a", "b", "c"]'),
        ("Alike[AnyUrl]", "'http://me:hunter2@shop/a?b=c'", "http://shop/a?b=c"),
        ("Alike[str]", "'amqp://me:hunter2@shop/a'", "amqp://shop/a"),
        ("Alike[str]", "'me@shop http://[a'", "me@shop http://[a"),
        ("Alike[SecretStr]", "hunter2", None),
    ],
)
def test_what_is_stored_of_a_key_has_no_password_and_is_the_same_in_each_process(
    site: Path,  # noqa: F811
    tmp_path: Path,
    key: str,
    value: str,
    stored: str | None,
) -> None:
    source = f"from pydantic import AnyUrl, SecretStr\n{MODULE}".replace(
        "channel: Alike[str]", f"channel: {key}"
    )
    install(site, "relay-pipe", {"pipe": "relay_pipe"}, {"relay_pipe": source})
    effects = Effects.of(loaded(tmp_path, f"{{type: pipe, channel: {value}}}"))
    assert effects.values.get("handlers.out.channel") == stored
