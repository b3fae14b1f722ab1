"""Health checks of a group from outside: what is missing, and which limits are exceeded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from relay.admin.phrases import counted, moment
from relay.admin.status import Status
from relay.observe.troubles import standstills
from relay.source.stream.slot import SlotState


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a healthy group, in bytes of WAL, seconds, transactions and dead letters; None is no limit."""

    lag_bytes: int | None = None
    lag_seconds: float | None = None
    sink_lag_seconds: float | None = None
    deferred: int | None = None
    dead: int | None = None


def failures(
    status: Status,
    limits: Limits,
    lag_seconds: float | None,
    sink_lag_seconds: Mapping[str, float],
) -> Iterator[str]:
    """Yield a line for each standstill and each limit that is exceeded; the lags, in seconds, matter where limited."""
    yield from (each.line for each in standstills(status))
    if limits.lag_bytes is not None and status.slot is not None:
        yield from _lag_bytes(status.slot, limits.lag_bytes)
    count = status.deferred.transactions if status.deferred else 0
    dead = status.dead_letters or 0
    if limits.lag_seconds is not None and (lag_seconds or 0.0) > limits.lag_seconds:
        yield f"the oldest unread event is {lag_seconds:.1f} s old, the limit is {limits.lag_seconds:g}"
    if limits.sink_lag_seconds is not None:
        for sink, lag in sink_lag_seconds.items():
            if lag > limits.sink_lag_seconds:
                yield (
                    f"the oldest event that sink {sink} has not read is {lag:.1f} s old, the limit is "
                    f"{limits.sink_lag_seconds:g}"
                )
    if limits.deferred is not None and count > limits.deferred:
        found = counted(count, "transaction is", "transactions are")
        yield f"{found} deferred, the limit is {limits.deferred}"
    if limits.dead is not None and dead > limits.dead:
        found = counted(dead, "dead letter", "dead letters")
        verb = "is" if dead == 1 else "are"
        yield f"there {verb} {found}, the limit is {limits.dead}: see `relay dlq list`"


def incomplete(status: Status, before: datetime, readers: Collection[str]) -> Iterator[str]:
    """Yield a line for each reader, a sink or '' for the target, that may lack events committed before a time."""
    known = {each.reader: each.complete_before for each in status.watermarks}
    for reader in readers:
        name = f"sink {reader}" if reader else "the target"
        reached = known.get(reader)
        if reached is None:
            yield f"{name} is not complete before {moment(before)}: it is not known up to when it is"
        elif reached < before:
            yield f"{name} is not complete before {moment(before)}, only before {moment(reached)}"


def _lag_bytes(slot: SlotState, limit: int) -> Iterator[str]:
    lag = slot.lag_bytes
    if slot.creating:
        yield "the lag in bytes is unknown: the slot is still being created"
    elif lag is None:
        yield "the lag in bytes is unknown: the source is a standby"
    elif lag > limit:
        yield f"{lag} bytes of WAL are not confirmed, the limit is {limit}"
