"""What users' code may import is there, light, and documented."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from importlib import import_module

import pytest

import relay
from tests.process import ROOT
from tests.reference import MODULES

REFERENCE = (ROOT / "docs" / "reference" / "python.md").read_text()
CODE = set(re.findall(r"`([A-Za-z_]+)[`(]", REFERENCE))
SHARED = {
    "Event": "a service publishes one with relay.client, and a handler gets one: both names are public",
    "Message": "a worker's handler gets one, and a broker's sink sends one: both names are public",
    "Delivery": "a function gets one, and a sink's queue has one for it",
    "Settings": "of the whole configuration, and of a type of sinks in the module of the type",
    "RetryLater": "a handler raises it, and the disposition is named after it",
}
"""Names that two classes of relay may have, and why."""


@pytest.mark.parametrize("module", MODULES)
def test_each_public_name_is_there_and_documented(module: str) -> None:
    found = import_module(module)
    assert set(found.__all__) <= set(dir(found))
    assert set(found.__all__) <= CODE
    for name in found.__all__:
        assert getattr(found, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'relay' has no attribute 'Nothing'"):
        _ = relay.Nothing  # type: ignore[attr-defined]
    with pytest.raises(ImportError):
        from relay import Nothing  # type: ignore[attr-defined]  # noqa: F401


def test_each_attribute_of_an_event_is_documented() -> None:
    public = {name for name in vars(relay.Event) if not name.startswith("_") and name != "row"}
    assert public - {"without", "with_texts"} <= CODE


def test_names_are_imported_when_they_are_asked_for() -> None:
    """In a process of its own, since others have imported more."""
    program = (
        "import sys; before = set(sys.modules); import relay; first = set(sys.modules) - before; "
        "from relay import Event, Transaction; second = set(sys.modules) - before - first; "
        "print(*sorted(each for each in first if each.startswith('relay')), "
        "'/', *sorted(each for each in second if each.startswith('relay')), "
        "'/', *({'numpy', 'psycopg', 'pydantic', 'pyspark'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    first, second, heavy = (part.split() for part in found.stdout.split("/"))
    assert first == ["relay"]
    assert second == [
        "relay.model", "relay.model.events", "relay.model.exact_json", "relay.model.headers"
    ]  # fmt: skip
    assert heavy == []


def test_what_needs_the_service_names_the_extra() -> None:
    """Without the installed packages: `relay --version` answers, and a name that needs one says how to get it."""

    def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)

    assert bare("-m", "relay", "--version").stdout == f"relay {relay.__version__}\n"
    hint = "pip install 'relay-outbox[service]'"
    refused = bare("-m", "relay", "status")
    assert (refused.returncode, hint in refused.stderr) == (2, True)
    assert hint in bare("-c", "from relay import EventTypes").stderr


def test_the_block_of_the_reference_is_a_handler() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", REFERENCE, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(block, "docs/reference/python.md", "exec"), names)
    assert callable(names["on_order"])


def test_no_two_classes_share_a_name() -> None:
    files = defaultdict(list)
    for file in sorted((ROOT / "relay").rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(file.relative_to(ROOT)))
    assert not {
        name: found for name, found in files.items() if len(found) > 1 and name not in SHARED
    }
