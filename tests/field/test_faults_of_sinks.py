"""What sinks of packages raise, whose texts and numbers come from receivers and libraries.

mldsveda/PyScrappy#143, IBM/mcp-context-forge#5674: Retry-After is a date, and what parses it as a number ends.
fazer-ai/agents#243, multica-ai/multica#7098, firecrawl/firecrawl#4113, estuary/flow#1885: PostgreSQL refuses a NUL in
the message of an error, so that the job is neither retried nor dead, or its worker ends.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay import Transaction
from relay.delivery import checkpoint
from relay.faults import asked_of, describe
from relay.sinks import Rejected, Undelivered
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.packages import install
from tests.unit.test_sink_types import MODULE, site  # noqa: F401


@pytest.fixture(autouse=True)
def _activity_is_stored_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "ACTIVITY_SECONDS", 0.1)


class Unprintable:
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("none")


@pytest.mark.parametrize(
    ("after", "seconds"),
    [
        (3, 3.0),
        ("3", 3.0),
        (" 0.5 ", 0.5),
        (timedelta(seconds=3), 3.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ([3], 0.0),
        (float("nan"), 0.0),
        (-1, 0.0),
        (None, 0.0),
    ],
)
def test_a_wait_that_is_no_number_is_none(after: Any, seconds: float) -> None:
    assert asked_of(Undelivered("busy", after=after)) == seconds


def test_a_fault_has_one_line_of_some_length_whatever_it_was_made_of() -> None:
    assert describe(Undelivered(Unprintable())) == "Undelivered"
    assert describe(Rejected("a\x00b\nc")) == "Rejected: a\\x00b c"
    assert len(describe(Undelivered("x" * 1_000_000))) < 3_000


RAISED = """[
    Undelivered('busy', after='1'),
    Undelivered('a' * 1_000_000),
    Undelivered('nul \\0'),
    Rejected('nul \\0', detail='\\0'),
    Rejected('a' * 3_000_000, detail='b' * 3_000_000),
    Rejected('half \\ud800', detail='\\udcff'),
    Undelivered('half \\ud800'),
    ValueError('half \\ud800 \\0'),
]"""


def test_what_a_sink_raises_concerns_its_event_only(
    outbox: Outbox,
    site: Path,  # noqa: F811
) -> None:
    source = MODULE.replace(
        "deliver(self, transaction):\n        pass",
        "deliver(self, transaction):\n        amount = next(iter(transaction.events)).payload['amount']\n"
        "        if amount < len(RAISED):\n            raise RAISED[amount]",
    ).replace("import Alike", "import Rejected, Undelivered, Alike")
    source += f"\n\nRAISED = {RAISED}\n"
    install(site, "relay-pipe", {"pipe": "relay_pipe"}, {"relay_pipe": source})
    config: dict[str, Any] = {
        "handlers": {
            "out": {
                "type": "pipe",
                "channel": "a",
                "retry": {"attempts": 2, "wait": 0.1, "jitter": 0.01, "defer_after": 0},
            }
        },
        "routes": [{"handlers": ["out"]}],
        "dead_letters": {"brake": 100},
    }
    with relaying(outbox.settings(**config)):
        for number in range(10):
            outbox.publish(host(number), event(number))
        wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") == 8)
        wait_until(lambda: outbox.value("select sum(confirmed) from relay.sink_activity") == 2)
    amounts = "select (payload->>'amount')::int as amount from relay.dead_letter_queue order by 1"
    assert outbox.column(amounts) == [*range(8)]


def test_a_handler_is_stopped_by_faults_whose_text_no_table_takes(
    outbox: Outbox,
    site: Path,  # noqa: F811
) -> None:
    source = MODULE.replace(
        "deliver(self, transaction):\n        pass",
        "deliver(self, transaction):\n        raise Rejected('nul \\0 half \\ud800' + 'a' * 1_000_000)",
    ).replace("import Alike", "import Rejected, Alike")
    install(site, "relay-pipe", {"pipe": "relay_pipe"}, {"relay_pipe": source})
    config: dict[str, Any] = {
        "handlers": {"out": {"type": "pipe", "channel": "a"}},
        "routes": [{"handlers": ["out"]}],
        "dead_letters": {"brake": 2},
    }
    with relaying(outbox.settings(**config)):
        for number in range(4):
            outbox.publish(host(number), event(number))
        wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") == 2)
        wait_until(lambda: outbox.value("select count(*) from relay.brakes") == 1)


@pytest.mark.parametrize(
    ("handler", "queries"),
    [
        (
            {"type": "pipe", "channel": "a"},
            [
                "select count(*) = 1 from relay.dead_letter_queue",
                "select strpos(max(fault), 'u65e5') > 0 and sum(confirmed) = 2 from relay.sink_activity",
            ],
        ),
        (
            {"type": "python", "callable": f"{__name__}:fails"},
            ["select strpos(max(sample_exception), 'u65e5') > 0 from relay.brakes"],
        ),
    ],
    ids=["sink", "python"],
)
def test_a_target_takes_what_its_encoding_lacks(
    outbox: Outbox,
    narrow: str,
    site: Path,  # noqa: F811
    handler: dict[str, Any],
    queries: list[str],
) -> None:
    source = MODULE.replace(
        "deliver(self, transaction):\n        pass",
        "deliver(self, transaction):\n        if next(iter(transaction.events)).payload['amount'] == 1:\n"
        "            raise Undelivered('\\u65e5\\u672c')",
    ).replace("import Alike", "import Undelivered, Alike")
    install(site, "relay-pipe", {"pipe": "relay_pipe"}, {"relay_pipe": source})
    retry = {"attempts": 3, "wait": 0.1, "max_wait": 0.2, "jitter": 0.01}
    config: dict[str, Any] = {
        "handlers": {"out": {**handler, "retry": {**retry, "defer_after": 0}}},
        "routes": [{"handlers": ["out"]}],
        "dead_letters": {"brake": 1},
    }
    with Outbox(narrow) as target:
        settings = outbox.settings(target={"dsn": target.relay_dsn}, **config)
        outbox.install_again(settings)
        with relaying(settings):
            for number in range(3):
                outbox.publish(host(number), event(number))
            for query in queries:
                wait_until(partial(target.value, query))


def fails(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Raise what no table takes."""
    raise ValueError("half \ud800 nul \0 \u65e5" + "a" * 1_000_000)


def test_a_python_handler_is_stopped_by_such_a_fault_too(outbox: Outbox) -> None:
    config: dict[str, Any] = {
        "handlers": {"out": {"type": "python", "callable": f"{__name__}:fails"}},
        "routes": [{"handlers": ["out"]}],
        "dead_letters": {"brake": 1},
    }
    with relaying(outbox.settings(**config)):
        for number in range(4):
            outbox.publish(host(number), event(number))
        query = "select length(sample_exception) from relay.brakes where braked_at is not null"
        wait_until(lambda: outbox.column(query) != [])
        assert 30 < outbox.column(query)[0] < 20_000
