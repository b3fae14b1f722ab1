"""Measures how Spark reads a whole outbox: relay's data source beside Spark's JDBC source, each in a new process."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlencode

from psycopg.conninfo import conninfo_to_dict

from bench.environment import seconds_of
from bench.outbox import Outbox
from bench.results import Measurement
from bench.workers.spark_reader import JAR

TASKS = 2


@dataclass(frozen=True, slots=True)
class SparkReading:
    """A reader of one kind: `jdbc`, `hosts` (ordered), `ranges` (not ordered), `stream` (AvailableNow) or `read`.

    `jdbc-two`, `ranges-two` and `read-two` read two columns.
    """

    kind: str

    def unavailable(self) -> str | None:
        """The reason why it cannot run here, or None."""
        missing = self.kind.startswith(("jdbc", "read")) and not JAR
        return (
            "there is no JDBC driver: install Debian's libpostgresql-jdbc-java" if missing else None
        )

    def read(self, outbox: Outbox, rows: int) -> Measurement:
        """Events a second in the second round; the first starts the workers and warms up the JVM."""
        fields: dict[str, str] = {
            str(key): str(value) for key, value in conninfo_to_dict(outbox.dsn).items()
        }
        login = [(key, fields[key]) for key in ("user", "password") if key in fields]
        url = f"jdbc:postgresql://{fields['host']}:{fields['port']}/{fields['dbname']}?{urlencode(login)}"
        arguments = (self.kind, outbox.dsn, url, str(rows), "1", str(TASKS))
        return {"events/s": rows / seconds_of("spark_reader", *arguments)}
