"""The manifests of config/kubernetes are ones that an API server takes, and relay their configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from relay.config.loading import load
from relay.config.settings import Address
from tests.process import ROOT

VERSION = "1.33"
DOCUMENTS: list[dict[str, Any]] = [
    document
    for file in sorted((ROOT / "config" / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(file.read_text())
]
WORKLOADS = [each for each in DOCUMENTS if "template" in each.get("spec", {})]


def name(document: dict[str, Any]) -> str:
    return f"{document['kind']} {document['metadata']['name']}"


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_a_manifest_is_valid(document: dict[str, Any]) -> None:
    """By the schema of Kubernetes' API, and without keys that it does not know."""
    kubernetes_validate.validate(document, VERSION, strict=True)


@pytest.mark.parametrize("workload", WORKLOADS, ids=name)
def test_a_pod_has_no_right_that_it_does_not_need(workload: dict[str, Any]) -> None:
    assert pod(workload)["securityContext"]["runAsNonRoot"] is True
    assert pod(workload)["automountServiceAccountToken"] is False
    for container in pod(workload)["containers"]:
        confined = container["securityContext"]
        assert confined["allowPrivilegeEscalation"] is False
        assert confined["readOnlyRootFilesystem"] is True
        assert confined["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("workload", WORKLOADS, ids=name)
def test_what_a_pod_mounts_and_reads_is_there(workload: dict[str, Any]) -> None:
    volumes = {volume["name"] for volume in pod(workload)["volumes"]}
    for container in pod(workload)["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        keys = [each.get("valueFrom", {}).get("secretKeyRef") for each in container["env"]]
        for key in filter(None, keys):
            assert key["name"] == "relay"
            # The comment on top says how to make them.
            assert (
                f"--from-literal={key['key']}="
                in (ROOT / "config/kubernetes/relay.yaml").read_text()
            )


def test_services_select_pods_and_deployments_their_own() -> None:
    labels = [workload["spec"]["template"]["metadata"]["labels"] for workload in WORKLOADS]
    selectors = [
        each["spec"]["selector"] for each in DOCUMENTS if "selector" in each.get("spec", {})
    ]
    for selector in selectors:
        wanted = selector.get("matchLabels", selector)
        assert len([found for found in labels if wanted.items() <= found.items()]) == 1


@pytest.mark.parametrize("kind", ["Job", "Deployment"])
def test_relay_takes_the_configuration(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the variables that the pods of relay have."""
    (config,) = [each for each in DOCUMENTS if each["kind"] == "ConfigMap"]
    (workload,) = [
        each
        for each in WORKLOADS
        if each["kind"] == kind and each["metadata"]["name"].startswith("relay")
    ]
    file = tmp_path / "relay.yaml"
    file.write_text(config["data"]["relay.yaml"])
    given = {"RELAY_SOURCE__DSN": "postgresql://relay@db/app", "POD_IP": "10.1.2.3"}
    for variable in pod(workload)["containers"][0]["env"]:
        value = variable.get("value", given.get(variable["name"], "secret"))
        monkeypatch.setenv(variable["name"], value)
    settings = load(file)
    assert settings.observe.listen == Address("0.0.0.0", 9464)
    assert settings.spark.plain_conf["spark.driver.host"] == "10.1.2.3"
    master = next(each for each in DOCUMENTS if each["kind"] == "Service")
    port = master["spec"]["ports"][0]["port"]
    assert settings.spark.master == f"spark://{master['metadata']['name']}:{port}"
