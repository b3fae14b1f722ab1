"""Whether a group works, for health checks: what is missing, and which limits are exceeded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from relay.admin.status import Status
from relay.source.slot import SlotState


@dataclass(frozen=True, slots=True)
class Limits:
    """What is still healthy: at most so much, in bytes of WAL, seconds, transactions and events; None: any."""

    lag_bytes: int | None = None
    lag_seconds: float | None = None
    sink_lag_seconds: float | None = None
    deferred: int | None = None
    dead: int | None = None


def failures(
    found: Status,
    group: str,
    limits: Limits,
    lag_seconds: float | None,
    sink_lag_seconds: Mapping[str, float],
) -> Iterator[str]:
    """A line for everything that is not healthy. What lags, in seconds, need only be given where it is limited."""
    if not found.instances:
        yield f"no instance of group {group!r} runs: start `relay run`"
    if found.source_mode != "poll":
        yield from _slot(found, group)
    if limits.lag_bytes is not None and found.slot is not None:
        yield from _lag_bytes(found.slot, limits.lag_bytes)
    count, dead = found.deferred.transactions, found.dead_letters
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
        yield f"{count} transactions are deferred, the limit is {limits.deferred}"
    if limits.dead is not None and dead > limits.dead:
        yield f"there are {dead} dead letters, the limit is {limits.dead}: see `relay dlq list`"


def _slot(found: Status, group: str) -> Iterator[str]:
    slot = found.slot
    if slot is None:
        yield "the replication slot is missing: run `relay init`"
    elif slot.lost:
        yield f"the slot {slot.name!r} can serve no more ({slot.invalidation_reason})"
    elif slot.creating:
        yield f"the slot {slot.name!r} is still being made, and waits for {found.slot_waits_for}"
    elif not slot.active:
        yield f"nobody reads the slot {slot.name!r}"
    elif found.slot_reader not in found.instances:
        yield (
            f"the slot {slot.name!r} is read by {found.slot_reader or 'a client without a name'}, "
            f"which is no instance of group {group!r}"
        )


def _lag_bytes(slot: SlotState, limit: int) -> Iterator[str]:
    lag = slot.lag_bytes
    if slot.creating:
        yield "the lag in bytes is not known: the slot is still being made"
    elif lag is None:
        yield "the lag in bytes is not known: the source is a standby"
    elif lag > limit:
        yield f"{lag} bytes of WAL are not confirmed, the limit is {limit}"
