"""The chart of deploy/helm: what helm makes of it is what an API server, Prometheus and relay take."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import relay
from relay.config.loading import load
from tests.helm import CHART, HEAD, MANIFEST, VALUES, helm, program, rendered
from tests.pages import DOCS, blocks
from tests.shell import needs
from tests.unit.test_kubernetes import VERSION, pod

pytestmark = [pytest.mark.rare]

EVERYTHING = """
image: {repository: registry.example/relay}
imagePullSecrets: [{name: registry}]
config:
  orders.yaml:
    group: orders
    source: {dsn: {env: ORDERS_DSN}, slot: orders, publication: orders}
    batch: {inline_max_events: 2000000, max_events: 2000000}
    handlers: {shop: {type: http, url: "https://shop.example/events"}}
    routes: [{handlers: [shop]}]
  payments.yaml:
    group: payments
    source: {dsn: {env: PAYMENTS_DSN}, slot: payments, publication: payments}
    batch: {inline_max_events: 1000, max_events: 1000}
    handlers: {shop: {type: http, url: "https://shop.example/events"}}
    routes: [{handlers: [shop]}]
secrets:
  name: outboxes
  env: {RELAY_SOURCE__DSN: null, ORDERS_DSN: orders-dsn, PAYMENTS_DSN: payments-dsn}
  files: relay-files
serviceAccountName: relay
nodeSelector: {disk: fast}
tolerations: [{key: dedicated, operator: Exists}]
affinity: {podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [
  {topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {app.kubernetes.io/name: relay}}}]}}
podAnnotations: {example.com/team: shop}
tmp: {sizeLimit: 2Gi}
extraArgs: [--log-level, debug]
readinessProbe: {periodSeconds: 2}
livenessProbe: {failureThreshold: 6}
podMonitor: {enabled: true, interval: 15s, labels: {release: prometheus}}
prometheusRule: {enabled: true, labels: {release: prometheus}}
networkPolicy:
  enabled: true
  from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]
  extraIngress: [{ports: [{port: 9465, protocol: TCP}]}]
"""
OF_THE_OPERATOR = "monitoring.coreos.com/v1"


@pytest.fixture(autouse=True)
def _helm() -> None:
    try:
        program()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"npm cannot fetch helm: {error}")


@pytest.fixture
def everything(tmp_path: Path) -> Path:
    """Values in which nothing is left as it is."""
    file = tmp_path / "values.yaml"
    file.write_text(EVERYTHING)
    return file


def documents(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if each]


def of_kind(kind: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    (one,) = (each for each in found if each["kind"] == kind)
    return one


def test_the_manifest_is_what_the_chart_makes() -> None:
    assert MANIFEST.read_text() == HEAD + rendered(VALUES), "run make manifests"


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == relay.__version__


def test_helm_finds_no_fault(everything: Path) -> None:
    helm("lint", "--strict", CHART, "-f", everything)


def test_without_a_configuration_it_says_what_is_missing() -> None:
    with pytest.raises(AssertionError, match="config is empty: give a file for each group"):
        helm("template", "relay", CHART)


def test_an_api_server_takes_each_manifest(everything: Path) -> None:
    """By the schema of Kubernetes' API; kinds of the operator of Prometheus are looked at below."""
    found = documents(rendered(everything))
    kinds = {each["kind"] for each in found}
    assert kinds == {
        *("ConfigMap", "Deployment", "Job", "NetworkPolicy", "PodMonitor", "PrometheusRule"),
    }
    for each in found:
        if each["apiVersion"] != OF_THE_OPERATOR:
            kubernetes_validate.validate(each, VERSION, strict=True)


def test_values_arrive(everything: Path) -> None:
    found = documents(rendered(everything))
    service = pod(of_kind("Deployment", found))
    (container,) = service["containers"]
    assert container["image"] == f"registry.example/relay:{relay.__version__}-slim"
    assert container["args"][-2:] == ["--log-level", "debug"]
    assert container["readinessProbe"]["periodSeconds"] == 2
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["failureThreshold"] == 6
    assert {each["name"] for each in container["volumeMounts"]} == {
        each["name"] for each in service["volumes"]
    }
    assert service["nodeSelector"] == {"disk": "fast"}
    keys = {
        each["name"]: each["valueFrom"]["secretKeyRef"]
        for each in container["env"]
        if "valueFrom" in each
    }
    # The administrator's connection string is the job's alone.
    assert keys == {
        "ORDERS_DSN": {"name": "outboxes", "key": "orders-dsn"},
        "PAYMENTS_DSN": {"name": "outboxes", "key": "payments-dsn"},
    }
    (init,) = pod(of_kind("Job", found))["containers"]
    assert {each["name"] for each in init["env"]} - {each["name"] for each in container["env"]} == {
        "RELAY_ADMIN_DSN"
    }


def test_each_file_is_a_group(
    everything: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = of_kind("ConfigMap", documents(rendered(everything)))["data"]
    for name in ("ORDERS_DSN", "PAYMENTS_DSN"):
        monkeypatch.setenv(name, "postgresql://relay@db/app")
    monkeypatch.setenv("RELAY_OBSERVE__LISTEN", "0.0.0.0:9464")
    loaded = {}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        loaded[name] = load(tmp_path / name)
    assert {name: each.group for name, each in loaded.items()} == {
        "orders.yaml": "orders",
        "payments.yaml": "payments",
    }
    # Helm reads numbers as floats.
    assert loaded["orders.yaml"].batch.max_events == 2_000_000


def test_a_job_and_the_pods_follow_the_configuration(everything: Path) -> None:
    """A job never changes, and relay reads its configuration when it starts."""

    def marks(text: str) -> tuple[str, str]:
        found = documents(text)
        template = of_kind("Deployment", found)["spec"]["template"]
        annotations = template["metadata"]["annotations"]
        return of_kind("Job", found)["metadata"]["name"], annotations["checksum/config"]

    before = marks(rendered(everything))
    assert marks(rendered(everything)) == before
    changed = marks(rendered(everything, "--set", r"config.orders\.yaml.partitions=4"))
    assert all(one != other for one, other in zip(before, changed, strict=True))


def test_prometheus_finds_the_pods_and_takes_the_rules(everything: Path, tmp_path: Path) -> None:
    found = documents(rendered(everything))
    monitor = of_kind("PodMonitor", found)["spec"]
    template = of_kind("Deployment", found)["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    (container,) = template["spec"]["containers"]
    assert endpoint["port"] in {each["name"] for each in container["ports"]}
    rules = of_kind("PrometheusRule", found)["spec"]
    assert f'up{{job="{labels[monitor["jobLabel"]]}"}}' in rules["groups"][0]["rules"][0]["expr"]
    needs("promtool")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yaml"], check=True, timeout=60)


def test_the_page_has_values_that_the_chart_knows(tmp_path: Path) -> None:
    page = blocks((DOCS / "how-to" / "kubernetes.md").read_text())
    (block,) = (each for each in page if each.file == "values.yml")
    (tmp_path / "values.yml").write_text(block.text)
    found = documents(rendered(tmp_path / "values.yml"))
    assert {"PodMonitor", "PrometheusRule", "NetworkPolicy"} < {each["kind"] for each in found}
    known = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(yaml.safe_load(block.text)) <= set(known)
