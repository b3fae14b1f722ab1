"""The SQL files that install relay."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from typing import get_args

import pytest

from relay.store.migrations import Side, files, name_of, tables

SIDES = get_args(Side)
FILES = sorted({file for side in SIDES for file in files(side)})


@pytest.mark.parametrize("side", SIDES)
def test_files_apply_in_the_order_of_their_numbers(side: Side) -> None:
    for _, of_folder in groupby(files(side), lambda file: file.parent):
        numbers = [int(file.name.split("_")[0]) for file in of_folder]
        assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_file_can_be_sent_to_a_database_of_any_encoding(file: Path) -> None:
    """A character that the database's encoding does not have makes the server refuse the whole file."""
    assert file.read_bytes().isascii()


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_file_records_itself_under_its_name(file: Path) -> None:
    recorded = re.findall(
        r"insert into relay\.migrations \(name\) values \('(.+?)'\)", file.read_text()
    )
    assert recorded == [name_of(file)]


def test_the_tables_of_a_side_are_those_that_its_files_create() -> None:
    assert "relay.dead_letter_queue" in tables("target")
    assert tables("source")[:2] == ["relay.migrations", "relay.streams"]
    assert "relay.log_counter" not in tables("target")
