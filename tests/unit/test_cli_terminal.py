"""Tables: folded at a terminal, one whole line a row where a program reads them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from relay.cli import dlq as dlq_commands
from relay.cli import terminal as printing
from relay.cli.terminal import print_facts, print_table

ID = "11111111-2222-3333-4444-555555555555"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A narrow terminal; what it shows."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=40, color_system=None)
    monkeypatch.setattr(printing, "out", console)
    return shown


def test_piped_rows_are_whole_lines_with_tabs(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("id", "exception"), [(ID, "x" * 300), (2, None)])
    assert capsys.readouterr().out == f"id\texception\n{ID}\t{'x' * 300}\n2\tNone\n"


def test_piped_facts_are_whole_lines_with_tabs(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts([("reason", "x" * 300), ("slot", "a\tb\nc")])
    assert capsys.readouterr().out == f"reason\t{'x' * 300}\nslot\ta\\tb\\nc\n"


def test_a_narrow_terminal_folds_and_shows_all(terminal: io.StringIO) -> None:
    print_table(("id", "exception"), [(ID, "x" * 60)])
    text = terminal.getvalue()
    assert "…" not in text
    assert text.count("x") == 60 + "exception".count("x")


def test_a_cell_is_no_markup_and_moves_no_cursor(terminal: io.StringIO) -> None:
    print_table(("exception",), [("[/b] [red]\x1b[2J",)])
    print_facts([("payload", "[/usr]\x07\n{}")])
    text = terminal.getvalue()
    assert "[/b] [red]\\x1b[2J" in text
    assert "[/usr]\\x07" in text
    assert "\x1b[2J" not in text


def test_an_exception_is_whole_in_a_pipe_and_cut_at_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert dlq_commands._first_line("x" * 81 + "\nframes") == "x" * 81
    monkeypatch.setattr(dlq_commands, "out", Console(file=io.StringIO(), force_terminal=True))
    assert dlq_commands._first_line("x" * 81) == "x" * 79 + "…"
    assert dlq_commands._first_line("x" * 80) == "x" * 80
