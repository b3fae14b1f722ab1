"""Names of relay have no word that is to be avoided, and tests import no private names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTEAD = {
    "anew": "again; recreate, rebuild",
    "behind": "lag; blocked by; after, past",
    "bell, ring": "wakeup, wake",
    "bury, buried, letter, letters (without *dead*)": "dead letter, to dead-letter",
    "casualty, casualties": "suspects",
    "choice": "hybrid source",
    "cure": "hint",
    "fate, fates": "disposition",
    "forgive": "note an orderly exit",
    "garbage": "memory",
    "gulp": "message buffer",
    "hasty": "short intervals",
    "news": "messages",
    "parcel": "delivery",
    "park, parked, waiting": "defer, deferred; blocked",
    "patience": "retry; timeout",
    "place, places": "index, indices; position; location",
    "revive, reviver": "retry, retry worker; redelivery",
    "settle, settled, suffer": "the precise verb: complete, remove, answer",
    "sight, sighting": "current position; comparison",
    "standing": "position; standby",
    "stranger, strangers": "other, untrusted",
    "tell, tells, told, untold": "report, describe; shown, unknown",
}
"""Words that no name of a module, class, function or parameter has, and what stands for them."""
AVOIDED = frozenset(
    word for words in INSTEAD for word in re.findall("[a-z]+", re.sub(r"\(.*?\)", "", words))
)


def names(tree: ast.Module) -> Iterator[str]:
    """The names of classes, functions and parameters."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg


def words(name: str) -> list[str]:
    """The words of a name in snake or camel case, in lower case, without the term dead letter."""
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return re.findall(r"[a-z]+", re.sub(r"dead_letters?", "", snake))


def test_no_name_has_a_word_to_avoid() -> None:
    assert len(AVOIDED) > 30
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in sorted((ROOT / "relay").rglob("*.py"))
        for name in [file.stem, *names(ast.parse(file.read_text()))]
        if not AVOIDED.isdisjoint(words(name))
    ]
    assert not found, f"instead: {INSTEAD}\n" + "\n".join(found)


def test_words_of_names() -> None:
    assert words("ReceiverSuspects") == ["receiver", "suspects"]
    assert words("_dead_letter_of") == ["of"]
    assert words("DeadLetters") == []
    assert words("letter_id") == ["letter", "id"]


def test_no_test_imports_a_name_with_an_underscore_of_another() -> None:
    imported = re.compile(r"^ *from (tests\.[\w.]+) import (\([^)]*\)|.*)", re.MULTILINE)
    found = [
        f"{file.relative_to(ROOT)}: {name} of {module}"
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for module, names in imported.findall(file.read_text())
        for name in re.findall(r"\b_\w+", names)
    ]
    assert not found, "give it a name without an underscore:\n" + "\n".join(found)


def test_the_glossary_has_each_term_once() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    terms = re.findall(r"^\| ([^|]+?) \|", glossary, re.MULTILINE)
    found = [term for term in terms if term != "term" and not term.startswith("-")]
    assert len(found) > 60
    assert sorted(found) == sorted(set(found))
