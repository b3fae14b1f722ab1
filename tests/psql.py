"""A psql with the options that the documentation uses (`-Atq`, `-c`, `-f`, standard input), for machines without it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import psycopg
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult


def main() -> None:
    options = arguments().parse_args()
    try:
        conn = psycopg.connect(options.dsn, autocommit=True, application_name="psql")
    except psycopg.OperationalError as error:
        sys.exit(f"psql: error: {error}")
    for text in options.command or [read(options.file)]:
        conn.pgconn.send_query(text.encode())
        while (result := conn.pgconn.get_result()) is not None:
            show(result, bare=options.tuples_only, quiet=options.quiet)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("psql")
    parser.add_argument("dsn", nargs="?", default="")
    parser.add_argument("-A", "--no-align", action="store_true")
    parser.add_argument("-t", "--tuples-only", action="store_true")
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("-c", "--command", action="append")
    parser.add_argument("-f", "--file")
    return parser


def read(file: str | None) -> str:
    return sys.stdin.read() if file is None else Path(file).read_text()


def show(result: PGresult, *, bare: bool, quiet: bool) -> None:
    if result.status == ExecStatus.COMMAND_OK:
        if not quiet:
            print((result.command_status or b"").decode())
    elif result.status == ExecStatus.TUPLES_OK:
        rows = [
            [(result.get_value(row, n) or b"").decode() for n in range(result.nfields)]
            for row in range(result.ntuples)
        ]
        show_rows([(result.fname(n) or b"").decode() for n in range(result.nfields)], rows, bare)
    else:
        sys.exit(f"psql: {result.error_message.decode()}")


def show_rows(names: list[str], rows: list[list[str]], bare: bool) -> None:
    """Print rows in psql's format: a table, or with `-At` unaligned."""
    if bare:
        print(*("|".join(row) for row in rows), sep="\n", end="\n" if rows else "")
        return
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for row in (names, ["-" * width for width in widths], *rows):
        joint, edge = ("-+-", "-") if row and row[0].startswith("-" * 2) else (" | ", " ")
        print(edge + joint.join(text.ljust(width) for text, width in zip(row, widths, strict=True)))
    print(f"({len(rows)} row{'' if len(rows) == 1 else 's'})\n")


if __name__ == "__main__":
    main()
