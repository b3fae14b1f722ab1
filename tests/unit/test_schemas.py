"""`relay schema export`: a file for each event type, and the same document for a program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from relay.admin.schemas import schemas
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from tests.event_types import EVENTS
from tests.process import relay

TYPES: dict[str, Any] = {
    "order.shipped/2": {"model": "tests.event_types:Item"},
    **EVENTS,
    "order.lost": {"version": 2, "upcast": {1: "tests.event_types:v1_to_v2"}},
}


def export(folder: Path, *arguments: str, events: Any = TYPES) -> tuple[str, str]:
    """Run the command in a folder; returns what it prints."""
    (folder / "relay.yaml").write_text(yaml.safe_dump({"events": events}, sort_keys=False))
    result = relay("schema", "export", *arguments, cwd=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def test_each_type_with_a_model_gets_a_file(tmp_path: Path) -> None:
    said, warned = export(tmp_path)
    files = ["order.placed.json", "order.shipped%2F2.json"]
    assert sorted(path.name for path in (tmp_path / "schemas").iterdir()) == files
    assert said.splitlines() == [
        "event type\tversion\tfile",
        "order.placed\t3\tschemas/order.placed.json",
        "order.shipped/2\t1\tschemas/order.shipped%2F2.json",
    ]
    assert warned == "relay: warning: events.order.lost has no model, so there is no schema of it\n"
    placed = json.loads((tmp_path / "schemas" / files[0]).read_text())
    assert placed["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert (placed["x-event-type"], placed["x-version"]) == ("order.placed", 3)
    assert placed["required"] == ["amount", "currency", "items"]
    assert list(placed["$defs"]) == ["Item"]


def test_a_second_export_is_the_same_and_json_has_all_of_them(tmp_path: Path) -> None:
    text, _ = export(tmp_path, "--json", "--dir", str(tmp_path / "a"))
    export(tmp_path, "--dir", str(tmp_path / "b"), events=dict(reversed(TYPES.items())))
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()} for folder in "ab"
    )
    assert first == second
    printed = json.loads(text)
    assert list(printed) == ["order.placed", "order.shipped/2"]
    assert printed["order.placed"] == json.loads(first["order.placed.json"])


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "relay.yaml").write_text(yaml.safe_dump({"events": EVENTS}))
    result = relay("schema", "export", "--dir", "file", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("relay: --dir: file: cannot be written (")
    assert len(result.stderr.splitlines()) == 1


class Odd(BaseModel):
    """A model that no JSON is valid for."""

    thing: Callable[[], int]


def test_a_model_that_json_schema_cannot_describe_is_one_line() -> None:
    settings = Settings(events={"a": {"model": f"{__name__}:Odd"}})
    with pytest.raises(
        ConfigurationError, match=r"^events\.a\.model: JSON Schema cannot describe it: "
    ):
        schemas(settings.events)
