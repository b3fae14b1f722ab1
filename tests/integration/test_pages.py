"""The tutorial and the how-to guides, followed command by command as they stand there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from relay.demo.embedded import free_port
from tests.brokers import KafkaCluster
from tests.pages import Reader, blocks, pages
from tests.postgres import Server

GUIDES = [page for page in pages() if page.stem == "tutorial" or page.parent.name == "how-to"]
_LONG = [pytest.mark.long, pytest.mark.timeout(900)]
FOLLOWED = [
    # Of Spark: each program of the page starts a JVM.
    pytest.param(page, id=page.stem, marks=_LONG if page.stem == "spark-jobs" else [])
    for page in GUIDES
    if any(block.language == "console" for block in blocks(page.read_text()))
]
PORTS = ("5433", "8080", "9464", "9465", "9466", "11300")
STATEMENTS = [
    (f"{page.name}:{block.line}", block.text)
    for page in pages()
    for block in blocks(page.read_text())
    if block.language == "sql"
]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[str]:
    """The address of a broker of Kafka, one of a cluster in this process."""
    with KafkaCluster(tmp_path) as cluster:
        yield cluster.handler["bootstrap"][0]


@pytest.fixture
def reader(server: Server, broker: str, tmp_path: Path) -> Iterator[Reader]:
    """Somebody with two empty databases, SOURCE and TARGET, and a broker."""
    names = ("page_source", "page_target")
    source, target = (server.create_database(name) for name in names)
    try:
        # What a page starts listens where nothing else does, since other tests run at the same time.
        replaced = {port: str(free_port()) for port in PORTS} | {"localhost:9092": broker}
        with Reader(tmp_path, replaced, SOURCE=source, TARGET=target) as made:
            yield made
    finally:
        for name in names:
            server.drop_database(name)


@pytest.mark.rare
@pytest.mark.parametrize("page", FOLLOWED)
def test_a_page_works_as_it_stands(page: Path, reader: Reader) -> None:
    reader.follow(page.read_text())


def test_sql_of_the_pages_is_sql(database: str, subtests: pytest.Subtests) -> None:
    """As the parser of PL/pgSQL has it: nothing is executed, and no table needs to be there."""
    with psycopg.connect(database, autocommit=True) as conn:
        for place, statements in STATEMENTS:
            with subtests.test(place):
                body = re.sub(r"^(begin|commit);$", "", statements, flags=re.MULTILINE)
                conn.execute(
                    "create or replace function page() returns void language plpgsql as"
                    f" $page$ begin {body} end $page$".encode()
                )
