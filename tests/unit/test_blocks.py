"""Each block of code of the documentation is what it says it is: configuration, Python, JSON, commands of relay."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from relay.config.handlers import KINDS
from relay.config.settings import Settings
from tests.packages import install_guides
from tests.pages import DOCS, Block, blocks, commands, pages
from tests.process import ROOT
from tests.shell import parse

LANGUAGES = {
    *("console", "sh", "text", "yaml", "python", "sql", "json"),
    *("dockerfile", "go", "ini", "java", "js", "nginx", "properties", "toml"),
}
ALL = [(page, block) for page in pages() for block in blocks(page.read_text())]
SQL = {"type": "sql", "statement": "select 1"}
SECRETS = {
    "dsn": "postgresql:///",
    "remote": "sc://spark",
    "url": "amqp://broker",
    "servers": "nats://broker",
}
"""What stands for a secret that is given by its file or variable, where any text will not do."""


def of(*languages: str) -> list[tuple[str, Block]]:
    """The blocks of languages, each with its place."""
    return [
        (f"{page.relative_to(ROOT)}:{block.line}", block)
        for page, block in ALL
        if block.language in languages
    ]


def test_each_block_names_its_language() -> None:
    """Also where a page of the repository's host would show it without colours."""
    assert [
        f"{page.name}:{block.line}: {block.language}"
        for page, block in ALL
        if block.language not in LANGUAGES
    ] == []


def test_what_nobody_runs_does_not_say_that_it_is_run() -> None:
    """```console is for pages that tests follow, ```sh and ```text for all others."""
    followed = {DOCS / "tutorial.md", *(DOCS / "how-to").glob("*.md"), DOCS / "operations.md"}
    assert [
        f"{page.name}:{block.line}"
        for page, block in ALL
        if block.language == "console" and page not in followed
    ] == []


def resolved(value: Any, key: str = "") -> Any:
    """A configuration whose secrets have values."""
    if isinstance(value, list):
        return [resolved(each, key) for each in value]
    if not isinstance(value, dict):
        return value
    if "call" in value:
        return {"call": "tests.callables:token"}
    if len(value) == 1 and next(iter(value)) in ("env", "file"):
        return SECRETS.get(key, "0123456789abcdef")
    return {name: resolved(below, name) for name, below in value.items()}


def whole(content: dict[str, Any]) -> dict[str, Any]:
    """A configuration made of a part of one: handlers without their key, routes without their handlers."""
    if all(isinstance(each, dict) and each.get("type") in KINDS for each in content.values()):
        content = {"handlers": content}
    routed = {name for route in content.get("routes", []) for name in route["handlers"]}
    braked = content.get("dead_letters", {}).get("brake_of", {})
    missing = dict.fromkeys({*routed, *braked}, SQL)
    archive = content.get("retention", {}).get("archive")
    if archive is not None:
        missing[archive] = {"type": "spark", "path": "/archive", "start": "beginning"}
    return {**content, "handlers": missing | content.get("handlers", {})}


@pytest.fixture(scope="module")
def _types_of_pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The types of sinks that pages bring."""
    folder = tmp_path_factory.mktemp("site")
    install_guides(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


@pytest.mark.usefixtures("_types_of_pages")
def test_yaml_is_configuration_of_relay(subtests: pytest.Subtests) -> None:
    """Except for files that end in .yml, which are other programs'."""
    for place, block in of("yaml"):
        with subtests.test(place):
            contents = list(yaml.safe_load_all(block.text))
            assert contents
            if block.file is not None and block.file.endswith(".yml"):
                continue
            for content in contents:
                Settings(**whole(resolved(content)))


def test_python_compiles(subtests: pytest.Subtests) -> None:
    for place, block in of("python"):
        with subtests.test(place):
            compile(block.text, place, "exec")


def test_json_is_json(subtests: pytest.Subtests) -> None:
    """One value, or one a line."""
    for place, block in of("json"):
        with subtests.test(place):
            try:
                json.loads(block.text)
            except json.JSONDecodeError:
                for line in block.text.splitlines():
                    json.loads(line)


def calls(block: Block) -> Iterator[list[str]]:
    """The arguments of each call of relay in a block."""
    lines = [each.text for each in commands(block.text)] if "$ " in block.text[:2] else None
    for line in lines or block.text.splitlines():
        for part in re.split(r"\||&&|;|\n", line):
            words = shlex.split(part.removeprefix("$ "), comments=True)
            if "relay" in words and (words[0] == "relay" or re.match(r"[A-Z_]+=", words[0])):
                yield words[words.index("relay") + 1 :]


def test_calls_of_relay_are_understood(subtests: pytest.Subtests) -> None:
    """By the parser of the command that they name."""
    for place, block in of("console", "sh", "text"):
        with subtests.test(place):
            if block.language == "text" and not block.text.startswith("$ "):
                continue
            for words in calls(block):
                parse(words)


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("relay dlq list --nothing", "--nothing"),
        ("relay nope", "no command nope"),
        ("relay status && relay sink seek shop --to", "requires an argument"),
    ],
)
def test_a_call_that_is_wrong_is_found(call: str, fault: str) -> None:
    *_, words = calls(Block("sh", call, 1))
    with pytest.raises(Exception, match=fault):
        parse(words)
