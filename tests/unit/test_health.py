"""The lines of `relay status --check` that need no database."""

from __future__ import annotations

from relay.admin.status import Status
from relay.observe.health import Limits, failures


def test_dead_letters_are_limited_as_one_number() -> None:
    """`Status.dead_letters` has those of queues, too."""
    status = Status("default", "poll", dead_letters=3)
    assert list(failures(status, Limits(dead=2), None, {})) == [
        "there are 3 dead letters, the limit is 2: see `relay dlq list`"
    ]
    assert not list(failures(status, Limits(), None, {}))
