"""The twenty questions of CONTRIBUTING.md lead to files that have what they name."""

from __future__ import annotations

import ast
import re

import pytest

from tests.process import ROOT

ANSWERS = re.findall(
    r"^\| .+\? \| `(relay/[\w/]+\.py)` \| `([\w.]+)` \|$",
    (ROOT / "CONTRIBUTING.md").read_text(),
    re.MULTILINE,
)


def _defined(path: str) -> set[str]:
    """Classes and functions of a module, and the methods of its classes as `Class.method`."""
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef)
            }
    return found


def test_there_are_twenty_questions() -> None:
    assert len(ANSWERS) == 20


@pytest.mark.parametrize(("path", "name"), ANSWERS)
def test_the_file_has_what_answers_the_question(path: str, name: str) -> None:
    assert name in _defined(path)
