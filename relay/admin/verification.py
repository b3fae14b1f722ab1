"""`relay verify`: compares what a Spark sink has written with the outbox, between two snapshots of the past."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import psycopg

from relay.admin.connections import reach_source, reach_target
from relay.config.settings import Settings
from relay.faults import ConfigurationError, RelayError
from relay.model.snapshots import BEGINNING, Snapshot
from relay.retention import partitions
from relay.source.outbox.differences import Difference
from relay.source.server import current_position
from relay.store import completeness
from relay.store.positions import offsets, sinks

if TYPE_CHECKING:
    from relay.spark.session import Session
    from relay.spark.verification import Comparison, Exceptions

SESSION_SECONDS = 300.0
"""How long the Spark session may take to be built."""


@dataclass(frozen=True, slots=True)
class Verification:
    """A comparison of the events that the snapshot `to` sees and `since` does not."""

    sink: str
    since: Snapshot
    to: Snapshot
    result: Comparison

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            "sink": self.sink,
            "from": str(self.since),
            "to": str(self.to),
            "equal": self.result.is_equal,
            **asdict(self.result),
        }


def verify(
    settings: Settings,
    sink: str,
    since: str | None,
    to: str | None,
    most_ids: int,
    session: Session | None = None,
) -> Verification:
    """Compare a sink with the outbox, from the snapshot `since` to `to`; by default all that it has.

    `session` is one that is ready and stays open; without it one is built and stopped. Raises ConfigurationError where
    that cannot be done, RelayError, and psycopg.Error.
    """
    if sink not in settings.spark_handlers:
        known = ", ".join(settings.spark_handlers) or "none"
        raise ConfigurationError(
            f"group {settings.group!r} has no sink {sink!r} of type spark, the only type that can be read (it has "
            f"{known})"
        )
    from relay.spark.destinations import require_readable
    from relay.spark.session import close_client, own_session
    from relay.spark.verification import compare

    # Before a session is built, which takes long.
    require_readable(sink, settings.spark_handlers[sink])
    between, exceptions = _range(settings, sink, _parsed("--from", since), _parsed("--to", to))

    is_remote = settings.spark.remote is not None
    with reach_source(settings) as source, _ready(settings, session) as ready:
        if not current_position(source).snapshot.covers(between.after):
            raise ConfigurationError(
                f"source.dsn: its server does not have yet everything up to {between.after}"
            )
        spark = ready.get()
        assert spark is not None  # noqa: S101
        # The view of a sink's query is this session's own.
        own = own_session(spark, is_remote)
        has_function = settings.spark_handlers[sink].transform is not None
        try:
            with one_line(sink, quoted=not has_function):
                result = compare(
                    own,
                    ready.slots,
                    source,
                    settings,
                    sink,
                    between,
                    exceptions,
                    is_retained=partitions.retained(source, settings.source.table) is not None,
                    most_ids=most_ids,
                )
        finally:
            if is_remote:
                close_client(own)
    return Verification(sink, between.before, between.after, result)


@contextmanager
def one_line(sink: str, quoted: bool) -> Iterator[None]:
    """Turn what Spark and the libraries of tables raise in this context into a ConfigurationError without values.

    Pass False for `quoted` where a user's function built the query: its text may contain values.
    """
    try:
        yield
    except (RelayError, psycopg.Error):
        raise
    except Exception as error:
        from relay.spark.descriptions import safe_description

        raise ConfigurationError(
            f"handlers.{sink}: it cannot be compared: {safe_description(error, quoted)}"
        ) from error


def _parsed(option: str, text: str | None) -> Snapshot | None:
    if text == "beginning":
        return BEGINNING
    try:
        return None if text is None else Snapshot.parse(text)
    except ValueError:
        raise ConfigurationError(
            f"{option}: {text!r} is no snapshot such as 701:703:701, as relay.watermarks and the commits of a table "
            "have it, nor beginning"
        ) from None


def _range(
    settings: Settings, sink: str, since: Snapshot | None, to: Snapshot | None
) -> tuple[Difference, Exceptions]:
    """The range to compare, and what is left out of it."""
    from relay.spark.verification import DeferredRows, Exceptions

    group = settings.group
    with reach_target(settings) as target:
        offsets.initialised(target, group)
        stored = {each.sink: each for each in sinks.read(target, group, [sink])}
        position = stored[sink].position.snapshot
        marks = {each.reader: each for each in completeness.watermarks(target, group, counts=False)}
        ids, deferred = completeness.exceptions(target, group, sink)
    if position is None:
        raise ConfigurationError(f"handlers.{sink}: the sink has not written yet")
    if since is None:
        if sink not in marks:
            raise ConfigurationError(
                f"handlers.{sink}: relay.watermarks does not say yet where the sink began: name the range with --from"
            )
        since = Snapshot.parse(marks[sink].since)
    to = position if to is None else to
    if not position.covers(to):
        raise ConfigurationError(
            f"--to: the sink has not written everything up to {to}: it is at {position}"
        )
    if not to.covers(since):
        raise ConfigurationError(f"--from: {since} is not before {to}")
    rows = [DeferredRows(*row) for row in deferred]
    return Difference(since, to), Exceptions(ids, rows)


@contextmanager
def _ready(settings: Settings, given: Session | None) -> Iterator[Session]:
    """A Spark session; one that is not `given` is stopped at the end. Raises ConfigurationError where none is built."""
    if given is not None:
        yield given
        return
    from relay.spark.session import Session

    session = Session(settings.spark)
    session.start()
    try:
        deadline = time.monotonic() + SESSION_SECONDS
        while session.get(timeout=0.5) is None:
            fault = session.condition.fault
            if fault is None and time.monotonic() < deadline:
                continue
            why = f": {fault.fault}" if fault else ""
            raise ConfigurationError(f"spark: the Spark session could not be built{why}")
        yield session
    finally:
        session.close()
