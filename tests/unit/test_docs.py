"""The documentation names every key, command and option that there is, and none that there is not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from relay.cli.app import app
from relay.config.loading import keys_at, paths
from relay.config.settings import Settings
from tests.reference import TYPES

ROOT = Path(__file__).resolve().parents[2]
EVERY_KEY = (ROOT / "config" / "relay.yaml").read_text()
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def keys_of(section: object, above: str = "") -> Iterator[str]:
    """The keys of a file, each with those above it."""
    if isinstance(section, dict):
        for key, below in section.items():
            yield f"{above}{key}"
            yield from keys_of(below, f"{above}{key}.")


def is_named(key: str, text: str) -> bool:
    """Whether a key stands in a YAML text, a comment's included."""
    return bool(re.search(rf"(?<![\w.]){re.escape(key)}:", text))


def commands(group: Any, above: str = "relay") -> Iterator[tuple[str, Any]]:
    """Every command below a group, by its whole name."""
    for name, command in group.commands.items():
        path = f"{above} {name}"
        if hasattr(command, "commands"):
            yield from commands(command, path)
        else:
            yield path, command


COMMANDS = dict(commands(typer.main.get_command(app)))
GROUPS = {path.rpartition(" ")[0] for path in COMMANDS} - {"relay"}
OPTIONS = {
    option
    for command in COMMANDS.values()
    for parameter in command.params
    for option in (*parameter.opts, *parameter.secondary_opts)
}


def test_the_file_of_every_key_has_every_key_and_no_other() -> None:
    known = set(paths(Settings, "."))
    # Where only a comment has them: the section is null by default.
    optional = {key for key in known if key.startswith(("observe.console.", "api."))}
    open_ended = ("handlers.", "routes", "events", "source.columns.", "dead_letters.brake_of.")
    given = set(keys_of(yaml.safe_load(EVERY_KEY)))
    assert known - given - optional == set()
    assert {key for key in given - known if not key.startswith(open_ended)} == set()
    assert {key for key in optional if not is_named(key.rpartition(".")[2], EVERY_KEY)} == set()


def test_a_page_generates_events_only_where_all_of_them_have_a_route(
    subtests: pytest.Subtests,
) -> None:
    for page in PAGES:
        with subtests.test(page.name):
            text = page.read_text()
            if "relay publish --generate" in text:
                assert "- match:" not in text or "unrouted: ignore" in text


def test_a_page_installs_the_wheel(subtests: pytest.Subtests) -> None:
    """The package is on no index."""
    for page in PAGES:
        with subtests.test(page.name):
            assert not re.search(r"pip install '?relay-outbox", page.read_text())


@pytest.mark.parametrize("kind", TYPES)
def test_the_file_of_every_key_has_the_keys_of_every_handler(kind: str) -> None:
    missing = [
        key
        for key in keys_at(("handlers", "h", kind))
        if not is_named(key, EVERY_KEY.partition("\nhandlers:")[2])
    ]
    assert missing == []


def test_a_page_names_no_option_that_no_command_has(subtests: pytest.Subtests) -> None:
    """Only of lines and code that name relay."""
    for page in PAGES:
        with subtests.test(page.name):
            text = page.read_text()
            spans = [
                *re.findall(r"`(relay [^`]*)`", text),
                *re.findall(r"^(?:\$ )?(relay .*)$", text, re.M),
            ]
            unknown = [
                option
                for span in spans
                for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", span.partition("#")[0])
                if option not in OPTIONS | {"--help", "--version"}
            ]
            assert unknown == []


def test_a_page_names_no_command_that_there_is_not(subtests: pytest.Subtests) -> None:
    """In code and at the prompt. The name of a Spark job begins with relay, too: `relay orders batch 17`."""
    for page in PAGES:
        with subtests.test(page.name):
            text = page.read_text()
            named = re.findall(r"`relay ([a-z]+)(?: ([a-z-]+))?[^`]*`", text)
            named += re.findall(r"^\$ relay ([a-z]+)(?: ([a-z-]+))?", text, re.M)
            unknown = [
                (first, second)
                for first, second in named
                if second != "batch"
                and f"relay {first}" not in COMMANDS
                and (
                    f"relay {first}" not in GROUPS
                    or (second and f"relay {first} {second}" not in COMMANDS)
                )
            ]
            assert unknown == []


def test_a_page_names_no_file_that_there_is_not(subtests: pytest.Subtests) -> None:
    for page in PAGES:
        with subtests.test(page.name):
            named = re.findall(
                r"`((?:relay|tests|bench|config|docs|examples|sql)/[\w./-]+)`", page.read_text()
            )
            assert [name for name in named if not (ROOT / name).exists()] == []


def test_a_page_names_no_key_that_there_is_not(subtests: pytest.Subtests) -> None:
    """Of the sections whose keys have no other dots in them, as those of Spark and of handlers have."""
    for page in PAGES:
        with subtests.test(page.name):
            known = set(paths(Settings, "."))
            sections = "source|target|sinks|retention|observe|poll|dead_letters"
            named = re.findall(rf"`((?:{sections})\.[a-z_.]+)[`:]", page.read_text())
            assert [key for key in named if key not in known and not key.endswith(".py")] == []


def links(page: Path) -> Iterator[str]:
    return iter(re.findall(r"\]\(([^)\s]+)\)", page.read_text()))


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}


def test_links_of_a_page_lead_somewhere(subtests: pytest.Subtests) -> None:
    for page in PAGES:
        with subtests.test(page.name):
            broken = []
            for link in links(page):
                if ":" in link.split("/")[0]:
                    continue
                path, _, anchor = link.partition("#")
                target = (page.parent / path).resolve() if path else page
                if not target.exists() or (anchor and anchor not in anchors(target)):
                    broken.append(link)
            assert broken == []


def test_a_page_of_the_site_links_to_nothing_outside_it(subtests: pytest.Subtests) -> None:
    """The site has only what stands in docs/."""
    for page in PAGES:
        with subtests.test(page.name):
            docs = ROOT / "docs"
            if not page.is_relative_to(docs):
                continue
            leading_out = [
                link
                for link in links(page)
                if ":" not in link.split("/")[0]
                and not (page.parent / link.partition("#")[0]).resolve().is_relative_to(docs)
            ]
            assert leading_out == []


def pages_of(nav: object) -> Iterator[str]:
    """The files that a navigation names."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list | dict):
        for below in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(below)


def test_the_navigation_has_every_page() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages_of(site["nav"])) == sorted(pages)


def test_architecture_names_every_folder_and_no_module_that_is_not() -> None:
    """And each module says in its first line what it does."""
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    named = set(
        re.findall(r"`(?:relay/)?([\w/]+\.py|\w+)/?`", text.partition("## Where things are")[2])
    )
    rooms = {each.name for each in (ROOT / "relay").iterdir() if "__init__" not in each.name}
    assert sorted(rooms - named - {"__pycache__", "py.typed"}) == []
    modules = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "relay").rglob("*.py")}
    assert sorted(set(re.findall(r"`(relay/[\w/]+\.py)`", text)) - set(modules)) == []
    silent = [
        name
        for name, path in modules.items()
        if path.stat().st_size and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_the_page_of_threads_has_every_thread() -> None:
    """A name is a literal, of a thread or the condition of a recurring part; names of sinks and groups stand in <>."""
    page = (ROOT / "docs/explanation/threads.md").read_text()
    code = "\n".join(each.read_text() for each in (ROOT / "relay").rglob("*.py"))
    threads = re.findall(r'Thread\((?:[^()]|\([^()]*\))*?\bname=f?"([^"]+)"', code, re.DOTALL)
    pools = re.findall(r'(?<!_)\bpool\(\w+, f?"([^"]+)"', code)
    beside = re.findall(r'\bbeside\(.*, "([^"]+)"\)', code)
    assert len(threads) > 10
    assert len(beside) > 1
    assert len(pools) > 2
    # Progress on a terminal, in the process of a command.
    names = {re.sub(r"\{.*?\}", "<>", each) for each in [*threads, *pools, *beside]} - {
        "view",
        "index build",
    }
    assert [name for name in sorted(names) if f"`{name}`" not in re.sub("<.*?>", "<>", page)] == []


def test_the_page_of_states_has_every_state_of_a_sink() -> None:
    """States are constants, literals of the statements, and the default of the column."""
    page = (ROOT / "docs/explanation/sink-states.md").read_text()
    statements = (ROOT / "relay/store/positions/sinks.py").read_text()
    schema = (ROOT / "sql/target/001_target.sql").read_text()
    table = re.search(r"create table.*?relay\.sink_claims \((.*?)\n\)", schema, re.DOTALL)
    assert table
    constants = re.findall(r'^[A-Z_, ]+ = ("[a-z ", ]+")$', statements, re.MULTILINE)
    states = {state for each in constants for state in re.findall(r'"([a-z ]+)"', each)}
    states |= set(re.findall(r"\bstate (?:in \()?(?:= )?'([a-z ]+)'", statements))
    states |= set(re.findall(r"\bthen '([a-z ]+)'", statements))
    states |= set(re.findall(r"\bstate +text .*default '([a-z ]+)'", table[1]))
    assert states == {
        *("new", "attached", "lagging", "caught up", "left out", "paused", "down"),
        *("not begun", "not configured", "not running"),
    }
    assert [state for state in sorted(states) if f"| `{state}` |" not in page] == []
