"""A streaming query of yours into a Delta table: each micro-batch once, and where a new checkpoint begins.

The commit of a micro-batch has its number, by the query's id, and the position at which it ends. So a query whose
checkpoint is lost goes on after what the table has.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError

from relay.faults import ConfigurationError
from relay.spark.query_positions import QueryPosition

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

_POSITION = "relay.position"
"""What a commit has of the micro-batch: everything up to this position is in the table, or the query left it out."""
_READ = 100
"""The newest commits that are read first; then twice as many, and so on."""


def append_to(
    path: str, storage_options: Mapping[str, str] | None = None
) -> Callable[[DataFrame, int], None]:
    """Return a function for `foreachBatch` that appends each micro-batch once to the Delta table at `path`.

    The first micro-batch of a checkpoint creates the table. `storage_options` are deltalake's. The function collects
    the micro-batch on the driver; it raises ConfigurationError where the table is gone, and deltalake's DeltaError.
    """
    import deltalake
    from deltalake.exceptions import TableNotFoundError

    options = dict(storage_options or {})

    def append(frame: DataFrame, number: int) -> None:
        rows = frame.toArrow()
        query = str(frame.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId"))
        if number == 0:
            deltalake.DeltaTable.create(path, rows.schema, mode="ignore", storage_options=options)
        try:
            table = deltalake.DeltaTable(path, storage_options=options)
        except TableNotFoundError:
            raise ConfigurationError(
                f"append_to: there is no table at {path}, to which this query has written {number} micro-batches: "
                "bring it back, or begin with a new checkpoint"
            ) from None
        newest = table.transaction_version(query)
        if not len(rows) or (newest is not None and newest >= number):
            return
        done = deltalake.CommitProperties(
            app_transactions=[deltalake.Transaction(query, number)],
            custom_metadata=_end(frame, query, number),
        )
        deltalake.write_deltalake(
            table, rows, mode="append", schema_mode="merge", commit_properties=done
        )

    return append


def position_of(path: str, storage_options: Mapping[str, str] | None = None) -> str:
    """Return the `startingPosition` of a new checkpoint: after the last micro-batch that the Delta table has.

    It is `beginning` where there is no table, or one without rows. One query may write the table. Raises
    ConfigurationError where no commit tells a position.
    """
    import deltalake
    from deltalake.exceptions import TableNotFoundError

    try:
        table = deltalake.DeltaTable(path, storage_options=dict(storage_options or {}))
    except TableNotFoundError:
        return "beginning"
    found = _position(table)
    if found is not None:
        return found
    if not table.file_uris():
        return "beginning"
    raise ConfigurationError(
        f"position_of: no commit in the log of the table at {path} tells up to where it has the outbox: give a "
        "position, beginning or now as startingPosition"
    )


def _position(table: DeltaTable) -> str | None:
    """The position of the newest micro-batch that the table has, as far as its log tells."""
    commits: dict[int, dict[str, Any]] = {}
    version, count = table.version(), 0
    while version >= 0:
        if version not in commits:
            before, count = len(commits), max(_READ, 2 * count)
            commits = {int(each["version"]): each for each in table.history(count)}
            if version not in commits and len(commits) == before:
                return None
            continue
        commit = commits[version]
        if _POSITION in commit:
            return str(commit[_POSITION])
        if commit.get("operation") == "RESTORE":
            to = str((commit.get("operationParameters") or {}).get("version"))
            if not to.isdigit():
                return None  # to a time
            version = int(to)
        else:
            version -= 1
    return None


def _end(frame: DataFrame, query: str, number: int) -> dict[str, str]:
    """Where a micro-batch ends, as its commit has it; nothing where the query does not read one outbox.

    Spark hands no offset to foreachBatch, but has written it to the query's log before.
    """
    session: Any = frame.sparkSession
    try:
        identity = session.sparkContext._jvm.java.util.UUID.fromString(query)
        running = session._jsparkSession.sharedState().activeStreamingQueries().get(identity)
        offsets = running.offsetLog().get(number).get().offsets()
        ends = [offsets.apply(at) for at in range(offsets.size())]
        positions = [json.loads(each.get().json()) for each in ends if each.isDefined()]
    except (Py4JError, AttributeError, TypeError):
        # Of a Spark whose classes are others: the rows are worth more than the position.
        log.warning("append_to: this Spark does not tell where a micro-batch ends")
        return {}
    known = [QueryPosition.of(each) for each in positions if "snapshot" in _fields(each)]
    return {_POSITION: str(known[0])} if len(known) == len(positions) == 1 else {}


def _fields(position: Any) -> Mapping[str, Any]:
    """The fields of an offset, which is a number in other sources."""
    return position if isinstance(position, dict) else {}
