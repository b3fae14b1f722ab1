"""Declares the queues that the configuration has (`queues`), when relay starts.

All instances of a group have them alike, so each of them may declare them: the second one changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from threading import Event
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from relay.config.settings import QueueSettings, Settings
from relay.faults import ConfigurationError, first_line, is_transient
from relay.runtime.parts import SOON_SECONDS, Condition, Part
from relay.runtime.retry import RetryUntilSuccess
from relay.store import locks
from relay.store.connections import asking

log = logging.getLogger(__name__)

_DECLARE = """
    select relay.declare_queue(
        name => %(name)s, match => %(match)s, "where" => %(where)s, params => %(params)s, key => %(key)s,
        attempts => %(attempts)s, backoff => make_interval(secs => %(backoff)s),
        max_backoff => make_interval(secs => %(max_backoff)s), keep_done => %(keep_done)s, workers => %(workers)s,
        paused => %(paused)s, group_id => %(group)s, configured => true, start => %(start)s)
"""


class ConfiguredQueues(Part):
    """Declares the queues before the first batch is applied; waits while the target cannot be reached."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stopping = Event()
        self._condition = Condition(
            "queues", log, "queues cannot be declared", "queues are declared", SOON_SECONDS
        )
        self._retry = RetryUntilSuccess(self._stopping, self._condition)

    def start(self) -> None:
        """Declare the queues. Raises ConfigurationError for one that is refused."""
        try:
            self._retry(self._declare)
        except psycopg.Error:
            if not self._stopping.is_set():
                raise

    def stop(self) -> None:
        """End a wait for the target."""
        self._stopping.set()

    @property
    def conditions(self) -> Sequence[Condition]:
        """Whether the queues can be declared."""
        return (self._condition,)

    def _declare(self) -> None:
        of = self._settings
        with asking(of.target_dsn) as conn:
            with conn.transaction():
                # Of two instances that start at once, the second finds what the first has declared.
                locks.lock_in_transaction(conn, locks.queues(of.group))
                changed = [
                    name
                    for name, queue in of.queues.items()
                    if declare(conn, of.group, name, queue)
                ]
            gone = no_longer_configured(conn, of.group, of.queues)
        if changed:
            log.info("queues declared", extra={"queues": ", ".join(changed)})
        if gone:
            log.warning(
                "queues are no longer in the configuration, and stay until they are dropped",
                extra={"queues": ", ".join(gone)},
            )


def declare(conn: psycopg.Connection[Any], group: str, name: str, queue: QueueSettings) -> bool:
    """Declare a queue; returns whether anything changed.

    Raises ConfigurationError, with its key, for a queue that is refused, and psycopg.Error for an outage.
    """
    values = queue.model_dump()
    for key in ("match", "params"):
        values[key] = None if values[key] is None else Jsonb(values[key])
    try:
        row = conn.execute(_DECLARE, {**values, "name": name, "group": group}).fetchone()
    except psycopg.Error as error:
        if is_transient(error):
            raise
        text = first_line(error).removeprefix("relay.declare_queue: ")
        raise ConfigurationError(f"queues.{name}: {text}") from None
    return row == (True,)


def no_longer_configured(
    conn: psycopg.Connection[Any], group: str, names: Collection[str]
) -> list[str]:
    """List the queues that relay has declared as its configuration said then, but for some. Raises psycopg.Error."""
    rows = conn.execute(
        "select name from relay.queues where group_id = %s and configured and name <> all (%s) order by name",
        (group, list(names)),
    )
    return [name for (name,) in rows]
