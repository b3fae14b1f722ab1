"""The pages of docs/reference that are made of the code are current."""

from __future__ import annotations

import pytest

from tests.pages import DOCS
from tests.reference import PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_the_code_says(name: str) -> None:
    """Also that every key of the configuration has a text: the page is not made without."""
    assert (DOCS / "reference" / name).read_text() == PAGES[name](), "run `make reference`"
