"""Splits a stopped group's hosts into another number of partitions: `relay offsets repartition`."""

from __future__ import annotations

from collections.abc import Sequence

from relay.admin.connections import reach_source, reach_target
from relay.admin.offsets import stopped
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.model.events import Lsn
from relay.pipeline.runner import Pipeline
from relay.runtime.reporting import ProgressReport, silent
from relay.source.outbox.polling import Poller
from relay.source.server import durable_position
from relay.source.stream.slot import slot_state
from relay.spark.engine import SparkEngine
from relay.spark.session import Session
from relay.store import groups
from relay.store.positions import offsets, snapshots


def repartition(settings: Settings, partitions: int, report: ProgressReport = silent) -> None:
    """Split the stopped group's hosts into another number of partitions.

    First it applies all committed events with the configured handlers, since hosts can move only between partitions at
    one position. A crash before the end changes nothing else. Raises ConfigurationError while an instance runs.
    """
    group = settings.group
    with reach_target(settings) as target, stopped(target, settings):
        positions = offsets.initialised(target, group)
        if settings.source.mode == "wal":
            _require_confirmed(settings, positions)
        else:
            unpinned = settings.poll.model_copy(update={"partition_ids": None})
            with reach_source(settings) as source:
                shown = durable_position(source).snapshot
            unsplit = settings.model_copy(update={"partitions": len(positions), "poll": unpinned})
            _catch_up(unsplit, report)
            # Noted transactions without rows: retention has removed their rows.
            snapshots.forget(target, group, shown)
            positions = offsets.initialised(target, group)
        with target.transaction():
            links = snapshots.chain(target, group)
            if len(links) > 1 or len(snapshots.noted(target, group)):
                raise ConfigurationError(
                    f"group: {group!r} has applied a commit that the source does not show yet, since it waits for a "
                    "synchronous standby: repartition when it is committed"
                )
            reached = groups.origin(target, group).polled
            offsets.remove(target, group)
            begun = snapshots.begin(target, group, [link.snapshot for link in links], reached)
            following = max(position.next_offset for position in positions)
            offsets.create(target, group, partitions, begun[0].id if begun else None)
            offsets.set_wal_position(
                target, group, max(position.applied_lsn for position in positions), following
            )


def _require_confirmed(settings: Settings, positions: Sequence[offsets.PartitionPosition]) -> None:
    """Raise ConfigurationError if a commit may have been applied in some partitions and not in others."""
    with reach_source(settings) as source:
        state = slot_state(source, settings.source.slot)
    confirmed = Lsn.parse((state and state.confirmed_flush_lsn) or "0/0")
    if max(position.applied_lsn for position in positions) > confirmed:
        raise ConfigurationError(
            f"group: {settings.group!r} has not confirmed all applied commits to the slot: run relay, and stop it "
            "when it is idle"
        )


def _catch_up(settings: Settings, report: ProgressReport) -> None:
    done = 0
    poller = Poller(settings)
    session = Session(settings.spark, settings)
    pipeline = Pipeline(settings, SparkEngine(settings, session))
    try:
        pipeline.start()
        for opening in (False, True, False):
            while batch := poller.window(opening):
                pipeline.run(batch)
                done += batch.events
                left = batch.window.left if batch.window else 0
                report("applying events", done, done + left)
                if opening:
                    break
    finally:
        pipeline.close()
        session.close()
        poller.close()
