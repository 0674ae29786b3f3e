# Everything runs in the environment $(VENV), made by scripts/setup_cpu.sh. SKIP_SETUP=1 uses it as it is.
VENV ?= .venv-cpu
VENV_PYTHON := $(VENV)/bin/python
# vllm-omni has an environment of its own on top: elsewhere it would change every vLLM engine.
OMNI_PYTHON ?= $(VENV)/omni/bin/python
# What only the SmolLM2 recipe needs.
SMOLLM2 ?= $(VENV)/smollm2
PYTEST := $(VENV_PYTHON) -m pytest
# Further arguments for pytest, for example ARGS="-k gate -x".
ARGS ?=
# Processes that share the tests of `make test`; each may have a training job or an engine, of up to 6 GiB.
WORKERS ?= 2
IN_PARALLEL := -n $(WORKERS) --dist loadscope --no-loadscope-reorder
TEST_PARTS := omni unit ray engine e2e nodes
BENCHMARKS := bench_queue bench_weights bench_packing_wall

.DEFAULT_GOAL := help
.PHONY: help setup setup-omni setup-browser setup-prometheus setup-nodes check format test tell-time test-unit test-ray test-engine test-omni test-smollm2 e2e faults nodes matrix bench docs config clean

help: ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: ## the CPU environment, with the tools for tests and checks
ifneq ($(SKIP_SETUP),1)
	@PARTIAL_ROLLOUT_DEV=1 bash scripts/setup_cpu.sh $(VENV)
endif

setup-omni: ## the CPU environment, and on top of it one with vllm-omni, for image models
ifneq ($(SKIP_SETUP),1)
	@PARTIAL_ROLLOUT_DEV=1 PARTIAL_ROLLOUT_OMNI=1 bash scripts/setup_cpu.sh $(VENV)
endif

setup-browser: ## Debian's Chromium for the tests of the page, if it is missing and you are root; make test installs none
	@command -v chromium || { [ "$$(id -u)" = 0 ] && apt-get update -q && apt-get install -qy --no-install-recommends chromium; } || \
	  { echo "the tests of the page need chromium: as root, apt-get install chromium"; exit 1; }

setup-prometheus: ## Debian's Prometheus for the tests of monitoring/, if it is missing and you are root; its service is not started
	@command -v promtool || { [ "$$(id -u)" = 0 ] && apt-get update -q && RUNLEVEL=1 apt-get install -qy --no-install-recommends prometheus \
	  && { systemctl disable --quiet prometheus 2>/dev/null || :; }; } || \
	  { echo "the tests of monitoring/ need prometheus and promtool: as root, apt-get install prometheus"; exit 1; }

setup-nodes: ## Debian's iproute2 for the tests over two nodes, if it is missing and you are root
	@command -v ip || { [ "$$(id -u)" = 0 ] && apt-get update -q && apt-get install -qy --no-install-recommends iproute2; } || \
	  { echo "the tests over two nodes need iproute2: as root, apt-get install iproute2"; exit 1; }

check: setup-omni ## ruff, format and types
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m pyright --pythonpath $(OMNI_PYTHON)

format: setup ## let ruff format and fix what it can
	$(VENV_PYTHON) -m ruff format .
	$(VENV_PYTHON) -m ruff check --fix .

test: tell-time test-omni ## everything that needs no GPU: unit, ray, engine, omni and the short end-to-end runs
	$(PYTEST) -m "not gpu and not omni and not faults" $(IN_PARALLEL) $(ARGS)

tell-time:
	@echo "make test: $(words $(TEST_PARTS)) parts ($(TEST_PARTS)), about 30 minutes on 2 quiet cores; it ends with what it did not run"

test-unit: setup ## two minutes, no Ray and no engine
	$(PYTEST) -m "not gpu and not ray and not engine and not e2e and not omni and not faults and not nodes and not slow" $(IN_PARALLEL) $(ARGS)

test-ray: setup ## tests with a local Ray cluster
	$(PYTEST) -m "ray and not gpu" $(ARGS)

test-engine: setup ## tests with a real vLLM engine on the CPU
	$(PYTEST) -m "engine and not gpu" $(ARGS)

test-omni: setup-omni ## tests with a real vllm-omni engine on the CPU
	PARTIAL_ROLLOUT_OMNI=1 $(OMNI_PYTHON) -m pytest -m "omni and not gpu" $(ARGS)$(if $(strip $(ARGS)), || [ $$? -eq 5 ] # 5: ARGS selected none of them)

test-smollm2: setup ## the problems of the SmolLM2 recipe with the real reasoning-gym, put into VENV/smollm2 (100 MB, a C compiler)
	test -d $(SMOLLM2) || $(VENV_PYTHON) -m pip install -q --no-deps --target $(SMOLLM2) -r requirements/smollm2.txt
	PYTHONPATH=$(abspath $(SMOLLM2)):$$PYTHONPATH $(PYTEST) tests/unit/run/test_smollm2.py $(ARGS)

e2e: setup ## whole training runs
	$(PYTEST) -m "e2e and not gpu" $(ARGS)

faults: setup ## training runs whose processes are killed or frozen, about two hours; times in outputs/faults/measured.jsonl
	$(PYTEST) -m faults -s $(ARGS)

nodes: setup setup-nodes ## training over two nodes in Linux namespaces, a quarter of an hour; as root
	PARTIAL_ROLLOUT_REQUIRE_NODES=1 $(PYTEST) -m nodes $(ARGS)

matrix: setup ## algorithms and models in whole short jobs, interrupted and started again; about 15 minutes
	$(VENV_PYTHON) -m tests.e2e.matrix --json outputs/matrix.json $(ARGS)

bench: setup-omni ## the benchmarks on a CPU, about an hour; results in outputs/bench (benchmarks/README.md)
	@for name in $(BENCHMARKS); do echo "== $$name"; $(VENV_PYTHON) -m benchmarks.$$name --json outputs/bench/$$name.json || exit 1; done
	$(OMNI_PYTHON) -m benchmarks.bench_diffusion --json outputs/bench/bench_diffusion.json
	$(VENV_PYTHON) -m benchmarks.jobs --shape small --steps 10 --repeats 2 --budget-s 3000 --out outputs/bench/jobs

docs: setup ## the documents as a site in build/site; a broken link ends it
	NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --strict --quiet
	@echo "build/site/index.html; with the search: $(VENV_PYTHON) -m http.server -d build/site"

config: setup ## the composed configuration: verl's defaults plus ours
	$(VENV_PYTHON) -m partial_rollout.main_ppo --cfg job

clean: ## caches and build results; the environment ($(VENV)) and outputs/ stay
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find partial_rollout tests -name __pycache__ -type d -prune -exec rm -rf {} +
