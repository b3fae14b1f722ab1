"""The lines of `relay status --check` that need no database."""

from __future__ import annotations

from relay.admin.status import Status
from relay.observe.health import Limits, failures
from relay.store.queues import QueueFigures


def _queue(name: str, dead: int) -> QueueFigures:
    return QueueFigures(name, None, 0, 0, 0, dead, 0.0, 0)


def test_dead_letters_of_each_queue_count() -> None:
    queues = [_queue("mail", 0), _queue("to print", 3), _queue("sms", 2)]
    status = Status("default", "poll", queues=queues, dead_letters=2)
    assert list(failures(status, Limits(dead=2), None, {})) == [
        "queue to print has 3 dead letters, the limit is 2: see `relay dlq list --queue 'to print'`"
    ]
    assert not list(failures(status, Limits(), None, {}))
