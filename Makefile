# `make demo` and `make test` work on a fresh clone: everything below depends on `setup`.
#
#   PYTHON       the interpreter that makes .venv (3.11 or newer)
#   TORCH_INDEX  an extra package index that has torch builds, for instance PyTorch's CPU index when the CUDA build
#                (several GB) is not wanted; empty: wherever pip looks already
#   PYTEST_ARGS  appended to every pytest call
#   SEEDS        how many simulated fault schedules `make sim` runs
#   SHAPES       over which sets of shapes
#   STRIKES      and how many strikes amid exchanges for each aggregation rule
#   SKEIN_MATRIX `entire`: tests try every case of their long matrices (`make matrix` sets it)
#   SKEIN_TEST_DEVICE  where tests of workers compute (`make gpu` sets it)

PYTHON ?= python3
TORCH_INDEX ?=
PYTEST_ARGS ?=
SEEDS ?= 300
SHAPES ?= any pipelines several guarded arrays sweeps meshes
STRIKES ?= 20

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
SBOM := $(VENV)/sbom/bin/cyclonedx-py
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Tests share two cores among several processes, leave nothing on the network and reuse big buffers instead of
# faulting in fresh pages for each (glibc reads MALLOC_* before the interpreter starts). Processes that tests start
# find modules compiled, also where the environment says that Python shall not keep what it compiles.
TEST_ENV = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
	RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0 RAY_COLOR_PREFIX=0 RAY_memory_monitor_refresh_ms=0 \
	MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483648 MALLOC_TOP_PAD_=16777216

UNITS = $(TEST_ENV) $(BIN)/python -m pytest --ignore=tests/e2e -n 2 --dist worksteal

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test units e2e e2e-long coverage matrix gpu scale screenshots check bench bench-aggregation proto fmt compose-test \
	docs sim constraints locks sbom clean

help: ## list these targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(READY) ## make .venv with everything in it (again only when pyproject.toml or constraints.txt change)

$(READY): pyproject.toml constraints.txt
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP_INSTALL) --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m skein.plan.route.warm
	touch $@

demo: setup ## train, export and sample a small language model on this machine
	$(BIN)/skein demo

test: units e2e ## units in parallel, then what only real processes show, one test at a time

units: setup ## all tests without processes of their own; those of the source itself are for `make check`
	$(UNITS) --ignore=tests/contract -m 'not long' $(PYTEST_ARGS)

e2e: setup ## one test with real processes for each kind of fault and of work
	$(TEST_ENV) $(BIN)/python -m pytest tests/e2e -m 'not long' $(PYTEST_ARGS)

e2e-long: setup ## the other tests with real processes: rules, cuts, moments of death, standbys, the demo; long ones of workers in one process
	$(TEST_ENV) $(BIN)/python -m pytest tests/e2e tests/worker -m long $(PYTEST_ARGS)

coverage: setup ## units, traced: which branches nobody takes; fails below 92 %
	$(UNITS) --cov --cov-report=term --cov-fail-under=92 $(PYTEST_ARGS)

matrix: setup ## tests of long matrices (shapes, strikes, moments, rules, seeds) with every case, loops watched
	SKEIN_MATRIX=entire $(UNITS) -o asyncio_debug=true $(PYTEST_ARGS)
	SKEIN_MATRIX=entire $(TEST_ENV) $(BIN)/python -m pytest tests/e2e $(PYTEST_ARGS)

gpu: setup ## tests of workers on the machine's GPUs
	SKEIN_TEST_DEVICE=cuda:0 $(TEST_ENV) $(BIN)/python -m pytest tests/worker/on_gpu.py $(PYTEST_ARGS)
	SKEIN_TEST_DEVICE=cuda:0 $(TEST_ENV) $(BIN)/python -m pytest tests/e2e/test_parity.py -m 'not long' $(PYTEST_ARGS)
	SKEIN_TEST_DEVICE=cuda:0 $(TEST_ENV) $(BIN)/python -m pytest tests/worker -n 4 -m 'not long' $(PYTEST_ARGS)

choices: setup ## 300 drawn fleets: no plan slower than the best order that is known
	SKEIN_MATRIX=entire $(TEST_ENV) $(BIN)/python -m pytest tests/plan/test_starts.py $(PYTEST_ARGS)

scale: setup ## a thousand simulated workers
	$(BIN)/skein bench scale

screenshots: setup ## of the page, in a browser that looks at a real run; into docs/screenshots
	SKEIN_SCREENSHOTS=docs/screenshots $(TEST_ENV) $(BIN)/python -m pytest tests/e2e/test_page.py

check: setup ## style, types, layers, generated code, packaging
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(TEST_ENV) $(BIN)/python -m pytest tests/contract $(PYTEST_ARGS)

fmt: setup ## format, and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: setup ## regenerate skein/wire/v1 from protos/
	$(BIN)/python protos/generate.py

docs: setup ## write the generated pages, and build the site with the reference in build/docs
	$(BIN)/python docs/generate_protocol.py
	$(BIN)/python docs/generate_aggregation.py
	$(BIN)/python -m docs.generate_troubleshooting
	$(TEST_ENV) $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -j auto -b html \
		-d build/docs-read docs build/docs

sim: setup ## SEEDS=300 simulated fault schedules, as many over each of several jobs, quotas and relays, chunks and shards, arrays, sweeps and meshes, STRIKES=20 strikes for each aggregation rule
	set -e; for shape in $(SHAPES); do \
		$(TEST_ENV) $(BIN)/python -m skein.sim --shape $$shape --seeds $(SEEDS) --processes 2; \
	done
	$(TEST_ENV) $(BIN)/python -m skein.sim --rule all --seeds $(STRIKES) --processes 2

bench: setup ## every comparison under bench/ (studies aside), one JSON line each
	$(BIN)/skein bench all

bench-aggregation: setup ## what aggregation rules cost, teach and bear; figures and plots go to docs/plots
	$(TEST_ENV) $(BIN)/python -m bench.studies.aggregation --record docs/plots/aggregation.json --plots docs/plots

compose-test: ## docker-compose up for real, a job through the published port, every dashboard query
	deploy/compose-test.sh

constraints: setup ## pin the newest versions that pyproject.toml allows; review the difference
	$(BIN)/python -m pip install --quiet --dry-run --ignore-installed --report $(VENV)/report.json -e '.[dev]'
	$(BIN)/python -c 'import json; \
	found = [part["metadata"] for part in json.load(open("$(VENV)/report.json"))["install"]]; \
	pins = {part["name"].lower().replace("_", "-"): part["version"].split("+")[0] for part in found}; \
	print(*(f"{name}=={pins[name]}" for name in sorted(pins) if name != "skein-train"), sep="\n")' > constraints.txt
	$(MAKE) locks

locks: setup ## what the images install, with hashes, from constraints.txt
	$(BIN)/python -m deploy.docker.hashes coordinator > deploy/docker/coordinator.lock
	$(BIN)/python -m deploy.docker.hashes worker examples > deploy/docker/worker.lock

sbom: setup ## bills of materials of the images, as CycloneDX: build/sbom/
	test -x $(SBOM) || { $(PYTHON) -m venv $(VENV)/sbom && $(VENV)/sbom/bin/pip install --quiet cyclonedx-bom==7.5.0; }
	mkdir -p build/sbom
	$(SBOM) requirements deploy/docker/coordinator.lock --pyproject pyproject.toml --output-file build/sbom/coordinator.json
	{ cat deploy/docker/worker.lock; grep ^torch== constraints.txt; } \
		| $(SBOM) requirements - --pyproject pyproject.toml --output-file build/sbom/worker.json

clean: ## remove .venv and everything generated by tools
	rm -rf $(VENV) build docs/reference dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage*
