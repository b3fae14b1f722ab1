"""The code blocks of the documentation, and a reader that runs their commands.

A block ```console has commands after `$ `, each followed by its output; a line that begins with `> ` continues the
command, and a line `^C` ends the service that was started last. A block whose first line is a comment with the name of
a file is that file. The tests do not run the commands of a block ```sh.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.outbox import LONG_SECONDS
from tests.process import ROOT

DOCS = ROOT / "docs"
INTERRUPT = "^C"
"""A line of a console block that ends the service that was started last."""
SITE = "site"
_FILE = re.compile(r"(?:#|--) ([\w./-]+\.[a-z]+)\n")
_SERVICES = ("relay run", "relay console", "relay api", "python -m relay.demo.postgres")
"""Commands that run until they are stopped."""
_READS = re.compile(
    r"(psql .*\bselect\b(?!.*relay\.publish)|curl|cat|grep|tail|relay (status|check|top|\w+ (list|show)))"
)
"""Commands without effects, which are repeated until their output is as expected."""


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    language: str
    text: str
    line: int
    """The line of the opening fence in the page, from 1."""

    @property
    def file(self) -> str | None:
        """The name of the file that the block is, if it is one."""
        match = _FILE.match(self.text)
        return match and match[1]


@dataclass
class Command:
    """A command of a page, and its output there."""

    text: str
    output: list[str] = field(default_factory=list)


def blocks(text: str) -> list[Block]:
    """The blocks of a page, in order."""
    return [
        Block(match[1], match[2], text.count("\n", 0, match.start()) + 1)
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]


def commands(console: str) -> list[Command]:
    """The commands of a block, in order."""
    found: list[Command] = []
    for line in console.splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:]))
        elif line == INTERRUPT:
            found.append(Command(line))
        elif line.startswith("> ") and not found[-1].output:
            found[-1].text += "\n" + line[2:]
        else:
            found[-1].output.append(line)
    return found


_LIKE = (
    (r"[0-9a-f]{8}-[0-9a-f]{4}-\S+", "#"),  # ids
    (r"\d{4}-\d\d-\d\d[T ][\d:.+]+( UTC)?", "#"),
    (r"\S+:\d+(?=\s|$)", "#"),  # instances
    (r"[0-9A-F]+/[0-9A-F]+", "#"),
    (r"-?\b\d[\d,.]*", "#"),
    (r"-{2,}", "--"),  # the rule of a table
)


def shape(line: str) -> str:
    """A line with its figures replaced and its white space normalised."""
    for pattern, stands in _LIKE:
        line = re.sub(pattern, stands, line)
    return " ".join(line.split())


def has_shape(printed: str, wanted: list[str]) -> bool:
    """Whether an output has the lines of a page, in order; `…` stands for any lines, at a line's end for any text."""
    lines = [shape(line) for line in printed.splitlines()]
    for line in wanted:
        if line == "…":
            continue
        like = shape(line.removesuffix("…"))
        open_end = line.endswith("…")
        matching = [
            n
            for n, each in enumerate(lines)
            if each == like or (open_end and each.startswith(like))
        ]
        if not matching:
            return False
        lines = lines[matching[0] + 1 :]
    return "…" in wanted or any(line.endswith("…") for line in wanted) or not any(lines)


def make_tools(folder: Path) -> None:
    """Write programs, which run those of this environment, into a folder for PATH: `relay`, `psql`, `python`,
    `pip`.

    What `pip` installs is for these programs only.
    """
    folder.mkdir(exist_ok=True)
    aside = f"--disable-pip-version-check --no-deps --no-build-isolation --target {folder / SITE}"
    for name, module, more in (
        ("relay", "-m relay ", ""),
        ("psql", "-m tests.psql ", ""),
        ("python", "", ""),
        ("python3", "", ""),
        ("pip", "-m pip ", f" {aside}"),
    ):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"{more}\n')
        (folder / name).chmod(0o755)


def clean_environment(tools: Path, **more: str) -> dict[str, str]:
    """The environment of a reader: the tools first on PATH, without variables of relay and PostgreSQL but `more`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RELAY_", "PG"))}
    return {
        **kept,
        "PATH": f"{tools}:{kept['PATH']}",
        "PYTHONPATH": f"{ROOT}:{tools / SITE}",
        **more,
    }


class Reader:
    """Runs the commands of a page in one shell, in its own folder; services run in the background until the end.

    `replaced` has texts of the page, such as a port, and their replacements.
    """

    def __init__(self, folder: Path, replaced: dict[str, str], **environment: str) -> None:
        make_tools(folder / ".bin")
        self.folder = folder
        self.replaced = replaced
        self.environment = clean_environment(folder / ".bin", **environment)
        self.services: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for name in reversed(list(self.services)):
            self.stop(name)

    def follow(self, page: str) -> None:
        """Write the files of a page and run its commands, in order.

        Raises AssertionError where a command fails, or does not print what the page shows.
        """
        for block in blocks(page):
            if block.file is not None:
                file = self.folder / block.file
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(self.here(block.text))
            elif block.language == "console":
                for command in commands(self.here(block.text)):
                    self.run(command)

    def here(self, text: str) -> str:
        for there, here in self.replaced.items():
            text = text.replace(there, here)
        return text

    def run(self, command: Command) -> None:
        """Run a command, and compare its output; wait for the output of a service, and repeat a query."""
        if command.text == INTERRUPT:
            self.stop(list(self.services)[-1])
            return
        if command.text.startswith(_SERVICES) or command.text.endswith("&"):
            self.start(command)
            return
        if command.output and _READS.match(command.text):
            expect(command, lambda: self.bash(command.text)[1])
            return
        status, printed = self.bash(command.text)
        is_as_shown = has_shape(printed, command.output) if command.output else status == 0
        assert is_as_shown, mismatch(command, printed)

    def bash(self, text: str) -> tuple[int, str]:
        """The exit status and the output of a command; later commands keep its exports and its folder."""
        state = self.folder / ".shell"
        script = (
            f"[ -e {state} ] && . {state}\n{text}\nstatus=$?\n"
            f"{{ export -p; echo cd $PWD; }} >{state}\nexit $status"
        )
        shell = subprocess.run(
            ["bash", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=self.environment,
            timeout=2 * LONG_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        return shell.returncode, shell.stdout

    def start(self, command: Command) -> None:
        """Start a service; if it runs, restart it."""
        text = command.text.removesuffix("&").strip()
        if text in self.services:
            self.stop(text)
        log = self.folder / f".log{len(list(self.folder.glob('.log*')))}"
        state = self.folder / ".shell"
        with log.open("wb") as file:
            process = subprocess.Popen(
                # SIGINT is ignored where a shell runs the tests in the background.
                [
                    "env",
                    "--default-signal=INT",
                    "bash",
                    "-c",
                    f"[ -e {state} ] && . {state}\nexec {text}",
                ],
                stdout=file,
                stderr=file,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
            )
        self.services[text] = process, log
        expect(Command(text, [*command.output, "…"]), log.read_text)

    def stop(self, service: str) -> None:
        """End a service with SIGINT, like Ctrl-C."""
        process, _ = self.services.pop(service)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def expect(command: Command, printed: Callable[[], str]) -> None:
    """Wait until the output has the lines of the page."""
    deadline = time.monotonic() + LONG_SECONDS
    while not has_shape(last := printed(), command.output):
        assert time.monotonic() < deadline, mismatch(command, last)
        time.sleep(0.3)


def mismatch(command: Command, printed: str) -> str:
    """The message of a failed comparison: a command's output, and the page's."""
    return f"$ {command.text}\nprinted\n{printed}\nand the page has\n" + "\n".join(command.output)


def pages() -> Iterator[Path]:
    """Every page of the documentation, the README and that of the benchmarks."""
    yield ROOT / "README.md"
    yield ROOT / "bench" / "README.md"
    yield from sorted(page for page in DOCS.rglob("*.md") if not page.is_symlink())
