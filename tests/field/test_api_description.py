"""The HTTP API against its description: Schemathesis asks what nobody would.

Found so in others: status 500 for a NUL character (zenml-io/kitaru#927), and statuses that were not described
(eadwinCode/django-ninja-jwt#114, vllm-project/vllm#17037).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from relay.api import publishing
from relay.api.streams import Client, EventStream
from tests.api import new_token, served, settings_of
from tests.outbox import Outbox, event, host

pytestmark = [pytest.mark.rare, pytest.mark.slow]

_CONFIG = """
continue-on-failure = true
request-timeout = 30

[checks.positive_data_acceptance]
# What no schema says: positions of this API only, events of one host and user, texts without U+0000 in payloads, no
# reply_type without wait; 410 for what is gone, and 413 for what is too much.
expected-statuses = ["2xx", "400", "403", "404", "409", "410", "413"]

[checks.negative_data_rejection]
# 413: more events than a list may have.
expected-statuses = ["400", "401", "403", "404", "405", "409", "413", "415", "422"]

[generation]
max-examples = 8
deterministic = true
"""


def test_the_api_does_what_its_description_says(
    outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every check. A stream ends here where it would wait for more, and nobody answers."""

    async def end(self: EventStream) -> None:
        client: Client = self._client
        client.end("stopping")

    async def no_reply(*_: object) -> None:
        return None

    monkeypatch.setattr(EventStream, "_go_on", end)
    monkeypatch.setattr(publishing, "_reply", no_reply)
    settings = settings_of(outbox)
    token = new_token(settings, rights=["read", "publish"])
    outbox.publish(host(1), event(1), event(2))
    config = tmp_path / "schemathesis.toml"
    config.write_text(_CONFIG)
    with served(settings) as address:
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"),
                *(f"{address}/v1/openapi.json", "--checks", "all"),
                # Without links, the stateful phase tries the same once more, and takes a number in a query for no text.
                *("--phases", "examples,coverage,fuzzing"),
                *("--header", f"Authorization: Bearer {token}"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=280,
        )
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-2_000:]
