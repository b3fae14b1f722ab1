"""The sessions of the HTTP API in the outbox's database: few, whose statements are bounded in time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from relay.admin.connections import require_schema
from relay.config.settings import Settings
from relay.store.connections import Connection, Pool, new_pool
from relay.store.session_settings import SessionKind, statements
from relay.web.sessions import READ_SECONDS

_SESSIONS = 8
_LOCK_SECONDS = 5.0


class ApiDatabase:
    """A pool of sessions, opened with the first request. Safe in several threads."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = Lock()
        self._pool: Pool | None = None

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Lend a session in autocommit mode. Raises ConfigurationError, psycopg.Error."""
        with self._opened().connection() as conn:
            yield conn

    def close(self) -> None:
        """Close the sessions."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _opened(self) -> Pool:
        with self._lock:
            if self._pool is None:
                bounds = {
                    "statement_timeout": f"{READ_SECONDS * 1000:.0f}",
                    "lock_timeout": f"{_LOCK_SECONDS * 1000:.0f}",
                }
                session = statements(SessionKind.OWN, bounds)
                self._pool = new_pool(
                    self.settings.source_dsn,
                    _SESSIONS,
                    session,
                    lambda conn: require_schema(conn, self.settings),
                )
            return self._pool
