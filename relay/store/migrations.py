"""Installs the schema: ordered SQL files, each applied once and recorded in `relay.migrations`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import psycopg

from relay import __version__
from relay.faults import ConfigurationError
from relay.store.locks import INSTALLATION

WAIT_SECONDS = 0.2

Side = Literal["source", "outbox", "target"]
_BOTH = "both"
"""The folder of what outbox and target have in common; one database may be both."""

FORMER = {
    "source/001_source.sql": frozenset(
        {
            "7c273b1b3e11920400ab3ffd8942b4541fc4a4549c77e8e32c8f9c1c7a378a20",  # policies could hide rows
            "ca8758880362105d1ee75e421dfc905896fcfc564f8573212c3938cfdf2edf48",  # any search_path
            "c42b8e4ec290b92e1ae2319ee3830b0db56ceb636644674b73b5025d4e519d42",  # relay_owner without the schema
            "5ce8243b107639cd358df635f7689b4cf05907ed06b55d782afa4320f30e4827",  # takes every function from PUBLIC
            "27b79b2c1d8eb53526a19a34a6a9a7079c51866759041612a5ca619648432daa",  # one number at a time
        }
    ),
    "source/002_retention.sql": frozenset(
        {
            "f5236e6a6e3616f8789503b4ccbf1fbf8fa9ad9827eaf2be077db369641cd47b",  # read deleted rows again
            "129cbc2d69d777965775096525441969fe52fe052c11de1f548b753c4b28bb4d",  # policies could hide rows
            "2381b8ef519f94687e56e7b4971b5ec920415b6451c77902b179eab6a03a0035",  # one outbox
            "8ad56f143c0408108a767a87293b984f2d72460dc03fa62b82e1159d5e9b5777",  # rights lost by a migration
            "675298a7fb7b7632d5130b88313dea443b49fe42ab8c47b4f11ada711b92e640",  # PostgreSQL 15 or later
            "e6b35ad582ad24fe597d01fa7d5f2d1ac433fbcce9a0da6b1d02d91726e92332",  # removals not noted
            "865a9040f79c7222490ad056b10ddaccdea2e3cd95afb96e39e750dbad73bc2c",  # no rights for readers of columns
            "df0c04db814389251ec0b725d068628dc31939f2d8838edaf43cbf8632343066",  # a partition far ahead is the newest
            "3d87e512ac2d6865262e3300be30658ffb92476379e8a7237d11c6553667286e",  # no upkeep in SQL
            "2dcb5934c3453cd1dfde42b473314f1198a159cdc64bd5a382995cdfab9190c6",  # upkeep in SQL and in Python
        }
    ),
    "target/001_target.sql": frozenset(
        {
            "87ce9101aca2e55bb42f8f8dc6c10d38d8409f002a3b564841e12d79581a5f3c",  # without sinks
            "e243868044c55fefb4d1685a5a5c20ed03a53cd7cf7bb784294e053fc09cd79c",  # without engines
            "f2d834851d17834e4e6237e7ab01da4c864305fc95476fbac1101856e27b666c",  # events staged for Spark
            "78431c67d907e4e8e177c2bd4837a67758854a118f279f74ef47d157f97af705",  # transactions not counted
            "9e35b6512d93254102c38670f4f84c0a43283b928874d6543d9eb576aaff5a9b",  # short transaction ids
            "515de2d899f88916f944ee2be0dbf412313e0cae0024a5caf4a44e56ea4ffcb7",  # no series, no counts
            "0c652b0ea5b34da4910e196e887d7a2e9fd93d85091337ee2cfad0320d11e0be",  # any search_path, no activity
            "b207934c179cea88ec4441ab455bef5ad02cc18ed8210290de321190c02ed7df",  # positions updated in place, no turns
            "7c2557aef5538db0b8547381d0d499dc558f468f0a6fc84c9da0b9bf8669a3ed",  # no functions
            "f4812c7bc10f1d7437d3b79cdf1325df4d7bae94485a7c615aac189dc8ea1f0d",  # no witnesses
            "ee7bd9d17fbc48c279ffcc9ff569f3a23acf74fd48f3df079143d687687aac9d",  # sinks updated in place
            "32be4b67b8321aeda29e338ac36074af0585a4548680ab6eabff2e75f5034cd4",  # a lock of sinks that is written twice
        }
    ),
    "outbox/001_outbox.sql": frozenset(
        {
            "49c831b682c4b6cd0d373bb56e3767b54ae543b3f7622b26610eb87a5b44a555",  # events of any size
            "7640cc536759a5ac588db9e4769b7f0a155da31e4403b084994aec146b668ac5",  # any search_path
            "95dbb51979e5cf382756e0b61b2ad6416c73528f67d9ec170d46610884149d90",  # causes are not noted
            "0d54b3cc6e18713e7e0589b2346fef9e7f6556509bb20117ad8a62be0a7bc3bf",  # the schema public of PUBLIC alone
            "f95c3a75f53a5318d603b8f61a6b949a7e275e71714961ca32d162562a0d2f44",  # one number at a time
        }
    ),
    "outbox/002_schedules.sql": frozenset(
        {
            "84138bb8655167dd18396949ae9b1674448fd95d943bce304b5cadbbd2185e19",  # no owners, no index
            "88d9420a9eac1eb8ee5215c44db53d3c9c8456a26311c0cbf1aaa539381118fc",  # what is declared has no bounds
            "fdcfa77cd2a0d302dac3779a59a43b70e21146e446a61c6b3439c3038ec44425",  # who declares waits for others
        }
    ),
    "outbox/003_readers.sql": frozenset(
        {
            "ee39e4f4b026e1609fb57fb438c278f667304a4fb471dd1e18bcce4ea338bc07",  # no sign of life, no conditions
            "482df0493cde99c8bad6f5900aaf2fca317222ce0a31f25bf174097187505ea3",  # positions of any history
            "1b84608bdefc1e83ecbd93e18d888edaef2ea0453ce86f66ec54612c27e2778d",  # retention waits for a reader
        }
    ),
    "outbox/004_subscribers.sql": frozenset(
        {
            "1d55bbf552465fe7f01ce21f3b490628ee0301ba07503cdb80f4f01aa1b43c74",  # what is declared has no bounds
            "e06f7c204ab00a3e4bdf515bc8b3d53cee0bd06c790ecc200a7718befc8e53ae",  # retention waits for a subscriber
        }
    ),
    "target/002_retention.sql": frozenset(
        {
            "b297bddc2124091b683d7c9c11754067c52c59639051196144ff6777847b9124",  # forgot acts on messages
        }
    ),
    "target/004_queues.sql": frozenset(
        {
            "f8e9f79f7aed0cb35809b06731ef9a2c2f3156c97048f696f579448fe37dc3ed",  # other names of variables
            "7d8f5e36f29317dcb73a8717c0875c6dd9ba9c6ca2f7d55961d3da115993c508",  # no claims
            "7e36153ba0b19041dd5ddbbea579c95638b5af8d8b3d5204d1c0bf59b782ff81",  # plans by stale statistics
            "d510da2f737a58e94f69f2779de435205655e42fb2368e28efd08052383d39ff",  # what is declared has no bounds
            "40f4cdde688e3aa4d30463ebeaafb9dea99830c1c199de54fea81977905fb6f8",  # a dropped queue holds back its group
            "4b0eeba6f6c1a7213e0b3e129c37d346e6306f712ce960951a3ffeaa386f753d",  # takes search behind failing keys
            "f063a1825dc42d5e30d427d02f9dae6fc48b83b7bc44f974d0d8b3196d21f4c3",  # what is dropped is delivered
        }
    ),
    "both/001_calls.sql": frozenset(
        {
            "ec2934fb89db7d136f48bf531f4bcab47cbaa80f5c3ed956a086383bb9020061",  # functions with fewer arguments stay
        }
    ),
    "target/005_scheduled.sql": frozenset(
        {
            "ac32c02324ef5b4f995f54bd277230f3b683530f2e9cb94964f84104edc2ff71",  # conditions three times
            "9f62e2e8db6a6bce67c2d7ad277994a55f51c4af397bfd9ff23cbbdfafd1b314",  # no retry is moved
            "e699fd3a1eec43440accd88740563e50ff686f44939738db671353080bf2d5b8",  # messages by id, event or key
        }
    ),
    "target/006_dead_letters.sql": frozenset(
        {
            "c56bac2752cbb7b46ea9dae6a934d142bc2a0e808f9487722789154f90fdee84",  # without endpoints
        }
    ),
    "target/007_attempts.sql": frozenset(
        {
            "ec3ddb760462bb72afd53c586b5e1dd8a229662129e630e6f6fb5221c7f7dcbd",  # the least room counts for all groups
        }
    ),
}
"""Former editions of files, by digest. The current edition migrates them: it is applied again."""


def sql_directory() -> Path:
    """Return the folder of the SQL files: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parent.parent
    shipped = package / "sql"
    return shipped if shipped.is_dir() else package.parent / "sql"


def files(side: Side) -> list[Path]:
    """List the files of one side in the order in which they are applied.

    The outbox and the target have some in common, which come first.
    """
    own = _folder(side)
    return own if side == "source" else _folder(_BOTH) + own


def _folder(name: str) -> list[Path]:
    return sorted((sql_directory() / name).glob("*.sql"))


def name_of(file: Path) -> str:
    """Return the name under which a file is recorded, such as `source/001_source.sql`."""
    return f"{file.parent.name}/{file.name}"


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, which distinguishes its editions."""
    return sha256(file.read_bytes()).hexdigest()


def recorded(conn: psycopg.Connection[Any]) -> dict[str, str | None]:
    """Return the files that were applied to this database, with their digests; empty where relay was never installed.

    A file that was applied with psql has no digest. Raises psycopg.errors.InsufficientPrivilege.
    """
    row = conn.execute("select to_regclass('relay.migrations') is not null").fetchone()
    if not row or not row[0]:
        return {}
    # to_jsonb, since the table of an early edition has no column digest.
    return dict(
        conn.execute(
            "select m.name, to_jsonb(m) ->> 'digest' from relay.migrations as m"
        ).fetchall()
    )


def require(conn: psycopg.Connection[Any], side: Side, key: str) -> None:
    """Raise ConfigurationError, with the command to run, unless the database has this program's schema.

    `key` is the configuration key of the database. Three small queries.
    """
    try:
        applied = recorded(conn)
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigurationError(
            f"{key}: {error.diag.message_primary}: {_hint_of_refusal(conn)}"
        ) from None
    _require_compatible(applied, side, key, conn.info.dbname)
    missing = _missing(applied, side)
    if not missing:
        _require_tables(conn, side, key)
        return
    if applied.keys().isdisjoint(map(name_of, _folder(side))):
        raise ConfigurationError(
            f"{key}: relay is not installed in the database {conn.info.dbname!r} ({missing[0]}): run `relay init`"
        )
    raise ConfigurationError(
        f"{key}: relay's schema in the database {conn.info.dbname!r} is older than this program, relay {__version__} "
        f"({_lacking(applied, missing[0])}): stop relay and run `relay init`"
    )


def _hint_of_refusal(conn: psycopg.Connection[Any]) -> str:
    """What to do where the session's role may not read the table of migrations, as after a dump without privileges."""
    row = conn.execute(
        "select coalesce(pg_has_role(to_regrole('relay'), 'usage'), false)"
    ).fetchone()
    if row and row[0]:
        return "run `relay init`, which gives the role relay its rights again"
    return f"connect as the role relay or a member of it, or run `grant relay to {conn.info.user}`"


def tables(side: Side) -> list[str]:
    """List the tables and views of relay's schema that the files of one side create, such as `relay.deferred`."""
    texts = "\n".join(file.read_text() for file in files(side))
    return re.findall(
        r"^create (?:table if not exists|or replace view) (relay\.\w+)", texts, re.MULTILINE
    )


def _require_tables(conn: psycopg.Connection[Any], side: Side, key: str) -> None:
    """Raise ConfigurationError if a table was dropped, which `relay init` does not create again."""
    dropped = conn.execute(
        "select name from unnest(%s::text[]) as name where to_regclass(name) is null",
        (tables(side),),
    ).fetchall()
    if dropped:
        names = ", ".join(name for (name,) in dropped)
        raise ConfigurationError(
            f"{key}: the database {conn.info.dbname!r} lacks {names}, which relay installed: restore that from a backup"
        )


def _missing(applied: Mapping[str, str | None], side: Side) -> list[str]:
    """List the files to apply, for the first time or to migrate a former edition."""
    names = map(name_of, files(side))
    return [name for name in names if name not in applied or applied[name] in FORMER.get(name, ())]


def _lacking(applied: Mapping[str, str | None], name: str) -> str:
    return f"{name} is of a former edition" if name in applied else f"{name} is missing"


def _require_compatible(
    applied: Mapping[str, str | None], side: Side, key: str, database: str
) -> None:
    """Raise ConfigurationError if the schema is one that `relay init` cannot turn into this program's."""
    digests = {name_of(file): digest_of(file) for file in files(side)}
    altered = [
        name
        for name, digest in digests.items()
        if applied.get(name) not in (None, digest, *FORMER.get(name, ()))
    ]
    folders = {name.partition("/")[0] for name in digests}
    unknown = sorted(
        name for name in applied if name.partition("/")[0] in folders and name not in digests
    )
    if altered:
        raise ConfigurationError(
            f"{key}: relay's schema in the database {database!r} has an edition of {altered[0]} that this program, "
            f"relay {__version__}, does not know: go back to the relay that installed it, or install a later one"
        )
    if unknown and _missing(applied, side):
        raise ConfigurationError(
            f"{key}: relay's schema in the database {database!r} comes from an unreleased edition of relay "
            f"({unknown[0]}), which `relay init` does not migrate: see docs/how-to/upgrade.md"
        )
    if unknown:
        raise ConfigurationError(
            f"{key}: relay's schema in the database {database!r} is newer than this program, relay {__version__} "
            f"({unknown[-1]}): install the relay that it belongs to, or a later one"
        )


@contextmanager
def alone(conn: psycopg.Connection[Any], on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of installation: no other session installs or uninstalls in the database meanwhile.

    `on_wait` is called once if another session holds the lock. Raises psycopg.Error.
    """
    waited = False
    # Polled: CREATE INDEX CONCURRENTLY would wait for a session that waits for the lock in the server.
    while not _try_lock(conn):
        if not waited:
            waited = True
            on_wait()
        time.sleep(WAIT_SECONDS)
    try:
        yield
    finally:
        with suppress(psycopg.Error):
            conn.execute("select pg_advisory_unlock(%s)", (INSTALLATION,))


def _try_lock(conn: psycopg.Connection[Any]) -> bool:
    row = conn.execute("select pg_try_advisory_lock(%s)", (INSTALLATION,)).fetchone()
    return bool(row and row[0])


def lock(conn: psycopg.Connection[Any]) -> None:
    """Wait for the lock of installation; it is held until the database transaction ends."""
    conn.execute("select pg_advisory_xact_lock(%s)", (INSTALLATION,))


def install(conn: psycopg.Connection[Any], side: Side, key: str) -> list[str]:
    """Apply missing files in one database transaction under an advisory lock; returns the names of the applied files.

    `key` is the configuration key of the database. Installing twice changes nothing; two at once wait for each other.
    Raises psycopg.Error, or ConfigurationError for a schema that cannot be migrated, with nothing applied.
    """
    with conn.transaction():
        lock(conn)
        applied = recorded(conn)
        _require_compatible(applied, side, key, conn.info.dbname)
        installed = _missing(applied, side)
        for file in files(side):
            if name_of(file) in installed:
                conn.execute(file.read_bytes())
                conn.execute(
                    "update relay.migrations set digest = %s where name = %s",
                    (digest_of(file), name_of(file)),
                )
    return installed
