"""What is shipped: NOTICE names every package of the image, and docker-compose.yml confines every service."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def test_notice_names_the_packages_of_the_image_and_no_others() -> None:
    locked = re.findall(
        r"^([a-z0-9][a-z0-9-]*)==", (ROOT / "requirements-runtime.lock").read_text(), re.M
    )
    named = re.findall(r"^  ([a-z0-9][a-z0-9-]*)  +\S", (ROOT / "NOTICE").read_text(), re.M)
    # Spark stands there by its name, and PySpark is Spark.
    assert set(locked) == {*named, "pyspark"}


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_service_is_confined(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"]
    assert service["init"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert service["pids_limit"]


def test_there_is_no_default_password() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    secrets = re.findall(r"\$\{(\w*(?:PASSWORD|SECRET))(\W)", text)
    assert {name for name, _ in secrets} == {"POSTGRES_PASSWORD", "RELAY_PASSWORD", "SPARK_SECRET"}
    assert all(f"${{{name}:?" in text and f"${{{name}:-" not in text for name, _ in secrets)
