"""Array literals, as PostgreSQL would write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.adapt import Transformer
from psycopg.types.array import ArrayLoader

from relay.store import literals

TEXT, TEXT_ARRAY = 25, 1009
TEXTS = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))


@given(TEXTS)
def test_texts_are_read_back(texts: list[str]) -> None:
    literal = literals.of_texts(texts)
    assert _read(literal) == texts


@pytest.mark.parametrize(
    ("texts", "literal"),
    [([], "{}"), ([""], '{""}'), (["a", "null"], '{"a","null"}'), (['"', "\\"], '{"\\"","\\\\"}')],
)
def test_texts(texts: list[str], literal: str) -> None:
    assert literals.of_texts(texts) == literal


def test_numbers() -> None:
    assert literals.of_numbers([]) == "{}"
    assert literals.of_numbers(range(3)) == "{0,1,2}"


class _Texts(ArrayLoader):
    base_oid = TEXT


def _read(literal: str) -> list[str]:
    """What psycopg's own parser of arrays makes of it."""
    loader = _Texts(TEXT_ARRAY)
    loader._tx = Transformer()
    found: list[str] = loader.load(literal.encode())
    return found
