# Everything a contributor or CI runs. `make help` lists the targets; a target without a help text is internal.
# Needs: Rust (rustup's stable, with rustfmt and clippy), Python 3.11 or newer with venv, a C compiler.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL: # the steps share two tools that use all cores, cargo and pytest

PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
DEPENDENCIES := $(VENV)/.dependencies
TORCH_VENV ?= .venv-torch
VLLM_VENV ?= .venv-vllm
UCX_WHEELS := $(VENV)/.ucx-wheels
# The copies of UCX in the environment that tests try beside the system's, as PDKV_TEST_UCX=PATH:PATH.
LIST_UCX = compgen -G '$(VENV)/lib/python3.*/site-packages/*/lib/libucp.so.0' || true; \
	compgen -G '$(VENV)/lib/python3.*/site-packages/nixl_cu1*.libs/libucp-*.so*' || true
WITH_UCX = PDKV_TEST_UCX="$${PDKV_TEST_UCX:-$$({ $(LIST_UCX); } | xargs -r realpath | paste -sd:)}"
NVRTC_WHEELS := $(VENV)/.nvrtc-wheels
# The compilers for the kernels of cuda/, as PDKV_TEST_NVRTC=PATH:PATH.
LIST_NVRTC = compgen -G '$(VENV)/lib/python3.*/site-packages/nvidia/cu13/lib/libnvrtc.so.13' || true; \
	compgen -G '$(VENV)/lib/python3.*/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12' || true
WITH_NVRTC = PDKV_TEST_NVRTC="$${PDKV_TEST_NVRTC:-$$({ $(LIST_NVRTC); } | xargs -r realpath | paste -sd:)}"
NVCC_WHEELS := $(VENV)/.nvcc-wheels
# The compiler that makes images of them ahead of time, as PDKV_TEST_NVCC=PATH.
LIST_NVCC = compgen -G '$(VENV)/lib/python3.*/site-packages/nvidia/cu13/bin/nvcc' || true
WITH_NVCC = PDKV_TEST_NVCC="$${PDKV_TEST_NVCC:-$$({ $(LIST_NVCC); } | head -n 1 | xargs -r realpath)}"

GPU_PYTHON ?= python3
GPU_CHECK_ARGS ?=
# What the machine with the GPU has: wheels for it are put into dist/ by `make wheel`.
GPU_PYTHON_VERSION ?= 3.12
GPU_PLATFORM ?= manylinux_2_28_x86_64
STANDIN := $(abspath $(or $(CARGO_TARGET_DIR),target))/standin
# The stand-in for the CUDA driver: its library, and the image of the kernels that it loads.
WITH_STANDIN = paths=$$(scripts/standin-cuda.sh $(STANDIN)) && set -- $$paths && \
	PDKV_CUDA_LIBRARY="$$1" PDKV_CUDA_IMAGE="$$2"
# A copy of UCX that emulates an adapter between memory of the stand-in, where there is one: the wheel's, whose module for CUDA asks the linker for the driver.
WITH_EMULATION = $(addprefix GPU_CHECK_UCX_POLICY=any PDKV_UCX_LIBRARY=,$(abspath $(wildcard $(VENV)/lib/python3.*/site-packages/libucx/lib/libucp.so.0))) \
	LD_LIBRARY_PATH=$(STANDIN)/lib

# Whoever has no C++ compiler does without the stand-in, unless it is insisted on.
NEEDS_CXX = command -v $${CXX:-c++} >/dev/null || [ "$${PDKV_CXX_REQUIRED:-}" = 1 ] || \
	{ echo 'no C++ compiler: what runs over the stand-in for the CUDA driver is skipped' >&2; exit 0; }

# PyO3 asks this interpreter for its facts; one value for all cargo calls keeps them from rebuilding one another.
export PYO3_PYTHON := $(BIN)/python
# Python keeps what it compiles, whatever the caller's habit: torch and vLLM come uncompiled, and a test starts many processes.
export PYTHONDONTWRITEBYTECODE :=
CARGO_FLAGS ?=
# pdkv-py is a Python extension: it has no Rust tests of its own, tests/ exercises it through the wheel.
RUST_TESTS := --workspace --exclude pdkv-py
SMALL_DEMO := --model tiny --isl 256 --iters 2
SDIST := target/sdist
BENCH_ARGS ?=
FUZZ_TARGET ?= frames
FUZZ_SECONDS ?= 60
PYTEST_ARGS ?=
# How many processes share the tests of pytest out; 0 is this one alone. Several take less time, but more memory.
PYTEST_PROCESSES ?= 0
SHARED_OUT := $(if $(filter-out 0,$(PYTEST_PROCESSES)),-n $(PYTEST_PROCESSES) --dist worksteal)

# The order of STYLE: cheap refusals first, the slow proofs after, pytest's summary last.
CHECK_STEPS := fmt-check tidy clippy test-rust doc build lint-python types stubtest sdist example demo-small \
	test-gpu gpu-check-dry test-torch test-vllm test-python

.PHONY: help venv ucx torch vllm build demo demo-small test test-rust test-gpu test-torch test-vllm test-python test-fast check fmt fmt-check tidy clippy doc \
	lint-python types stubtest sdist example bench figures kernel-figures floors bench-vllm bench-plan gpu-check gpu-check-dry fuzz wheel clean

help: ## Show this list
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | \
		while IFS='|' read -r target text; do printf '  %-14s %s\n' "$$target" "$$text"; done

venv: build ## Create .venv with the development tools and the package in it

ucx: $(UCX_WHEELS) ## Install UCX to test with: the system's (by apt, as root) and wheels into .venv
	@scripts/install-ucx.sh

torch: $(DEPENDENCIES) ## Make .venv-torch, with torch and vLLM 0.8.5's classes to test with (1.2 GB)
	@scripts/test-env.sh $(TORCH_VENV) tests/with_torch/requirements.txt $(VENV)

vllm: $(DEPENDENCIES) ## Make .venv-vllm, with vLLM for the CPU, NIXL and a router to test with (2.6 GB)
	@scripts/test-env.sh $(VLLM_VENV) tests/with_vllm/requirements.txt $(VENV)

build: $(DEPENDENCIES) ## Compile the extension (release) and install it into .venv
	@compgen -G 'python/pdkv/_core*.so' >/dev/null || echo 'compiling pdkv, which takes a few minutes the first time'
	@PIP_QUIET=1 VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release $(CARGO_FLAGS) --quiet

demo: build ## Build everything and run the main job: two processes, one KV cache, every byte verified
	@$(BIN)/pdkv bench $(BENCH_ARGS)

test: test-rust build test-gpu gpu-check-dry test-torch test-vllm test-python ## Build and run all tests, Rust and Python

test-fast: build $(UCX_WHEELS) ## Run the tests that take minutes once compiled: few property cases, no slow marks
	@$(WITH_UCX) PROPTEST_CASES=16 cargo test $(CARGO_FLAGS) --quiet $(RUST_TESTS) --lib
	@$(WITH_UCX) $(BIN)/pytest -q -m 'not slow' $(PYTEST_ARGS)

check: ## Run everything CI runs, in CI's order
	@for step in $(CHECK_STEPS); do \
		printf '== %s\n' "$$step"; start=$$SECONDS; \
		$(MAKE) --no-print-directory "$$step"; \
		[ "$$step" = test-python ] || printf -- '-- %s took %s s\n\n' "$$step" "$$((SECONDS - start))"; \
	done

fmt: $(DEPENDENCIES) ## Format Rust and Python
	@cargo fmt --all
	@$(BIN)/ruff format --quiet
	@$(BIN)/ruff check --quiet --fix --select I

bench: build ## Run the benchmark (BENCH_ARGS="--model qwen3-32b --format json")
	@$(BIN)/pdkv bench $(BENCH_ARGS)

figures: build ## Measure what README.md and docs/performance.md publish, and write it there
	@mkdir -p bench-results
	@$(BIN)/pdkv bench --transport shm,cma,tcp --block-bytes 4KiB,16KiB,64KiB,256KiB,1MiB --total 512MiB --iters 7 \
		--format json --output bench-results/figures.json
	@$(BIN)/python benches/figures.py bench-results/figures.json

kernel-figures: $(NVRTC_WHEELS) ## Compile the GPU kernels and write what they cost into cuda/figures.md
	@$(WITH_NVRTC) PDKV_WRITE_FIGURES=1 PDKV_NVRTC_REQUIRED=1 cargo test $(CARGO_FLAGS) --quiet -p pdkv-device --test nvrtc every

floors: build ## Measure every speed that pdkv promises and judge it (minutes, wants a quiet machine)
	@$(BIN)/pdkv bench --suite floors $(BENCH_ARGS)

bench-vllm: build vllm ## Measure what handing over costs in vLLM, beside NIXL's connector (minutes, wants a quiet machine)
	@$(VLLM_VENV)/bin/python benches/vllm_handover.py $(BENCH_ARGS)

# Builds nothing: on a machine with a GPU there may be no Rust. pdkv and numpy are the installed ones, or wheels in dist/.
gpu-check: ## Prove and measure pdkv on a machine with a GPU and torch (DRY=1: all its steps, on a stand-in for the driver)
ifeq ($(DRY),1)
	@$(MAKE) --no-print-directory build gpu-check-dry
else
	@PYTHONPATH=benches $(GPU_PYTHON) -m gpu_check $(GPU_CHECK_ARGS)
endif

bench-plan: ## Run the criterion benchmark of the planner
	@cargo bench $(CARGO_FLAGS) -p pdkv-core --bench plan

fuzz: ## Fuzz a decoder (needs nightly and cargo-fuzz; FUZZ_TARGET=frames|issuer|node|pipe|reference_json FUZZ_SECONDS=60)
	@cargo +nightly fuzz run $(FUZZ_TARGET) -- -max_total_time=$(FUZZ_SECONDS)

wheel: $(DEPENDENCIES) ## Build the release wheel into dist/, and put what `make gpu-check` needs with it on a bare machine beside it
	@$(BIN)/maturin build --release $(CARGO_FLAGS) --out dist
	@$(BIN)/python -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["gpu-machine"], sep="\n")' \
		| $(BIN)/pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --implementation cp \
			--python-version $(GPU_PYTHON_VERSION) --platform $(GPU_PLATFORM) --dest dist --requirement /dev/stdin

clean: ## Remove everything that can be built again
	rm -rf target .venv .venv-torch .venv-vllm dist .mypy_cache .ruff_cache .pytest_cache
	find python tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f python/pdkv/_core*.so

# The steps of `make check`, each callable alone.

fmt-check: $(DEPENDENCIES)
	@cargo fmt --all -- --check
	@$(BIN)/ruff format --check --quiet || { $(BIN)/ruff format --diff; exit 1; }

tidy: $(DEPENDENCIES)
	@$(BIN)/pytest -q --confcutdir=tests/repo tests/repo

clippy: $(DEPENDENCIES)
	@cargo clippy $(CARGO_FLAGS) --quiet --workspace --all-targets -- -D warnings

test-rust: $(DEPENDENCIES) $(UCX_WHEELS) $(NVRTC_WHEELS) $(NVCC_WHEELS)
	@$(WITH_UCX) $(WITH_NVRTC) $(WITH_NVCC) cargo test $(CARGO_FLAGS) --quiet $(RUST_TESTS)

doc: $(DEPENDENCIES)
	@RUSTDOCFLAGS='-D warnings' cargo doc $(CARGO_FLAGS) --quiet --workspace --no-deps --document-private-items

lint-python: $(DEPENDENCIES)
	@$(BIN)/ruff check

types: $(DEPENDENCIES)
	@$(BIN)/mypy

stubtest: $(DEPENDENCIES)
	@$(BIN)/stubtest pdkv._core --mypy-config-file pyproject.toml --ignore-unused-allowlist \
		--allowlist rust/pdkv-py/stubtest-allowlist.txt

sdist: $(DEPENDENCIES)
	@rm -rf $(SDIST) && mkdir -p $(SDIST)/tree
	@$(BIN)/maturin sdist --out $(SDIST)
	@tar -xzf $(SDIST)/pdkv-*.tar.gz -C $(SDIST)/tree --strip-components=1
	@CARGO_TARGET_DIR=$${CARGO_TARGET_DIR:-$(CURDIR)/target} \
		cargo check $(CARGO_FLAGS) --quiet --package pdkv-py --manifest-path $(SDIST)/tree/Cargo.toml

example: $(DEPENDENCIES)
	@$(BIN)/python examples/two_processes.py

demo-small: $(DEPENDENCIES)
	@$(BIN)/pdkv bench $(SMALL_DEMO)

# A process keeps the driver that it has opened, so what needs one has a run of its own, on the stand-in.
test-gpu: $(DEPENDENCIES)
	@$(NEEDS_CXX); $(WITH_STANDIN) $(BIN)/pytest -q tests/with_gpu $(PYTEST_ARGS)

# All steps that need no hardware: with numpy in torch's place, UCX emulating an adapter; and with torch, where its environment can be made.
gpu-check-dry: $(DEPENDENCIES) $(UCX_WHEELS)
	@$(NEEDS_CXX); program='$(TORCH_VENV)/bin/python -m with_torch.gpu_steps'; \
	$(MAKE) --no-print-directory torch || { [ "$${PDKV_TORCH_REQUIRED:-}" != 1 ] || exit 1; \
		echo 'no $(TORCH_VENV): the steps that need torch are not run'; program='$(BIN)/python -m gpu_check --dry'; }; \
	rm -rf $(STANDIN)/gpu-check; \
	$(WITH_STANDIN) $(WITH_EMULATION) PYTHONPATH=tests:benches $$program --out $(STANDIN)/gpu-check $(GPU_CHECK_ARGS)

# The same tools as the rest, and torch: the environment lies on top of $(VENV).
test-torch: torch
	@$(TORCH_VENV)/bin/python -m pytest $(SHARED_OUT) tests/with_torch $(PYTEST_ARGS)

# Real vLLM, by the environment that lies on top of $(VENV) too.
test-vllm: vllm
	@$(VLLM_VENV)/bin/python -m pytest tests/with_vllm $(PYTEST_ARGS)

test-python: $(DEPENDENCIES) $(UCX_WHEELS)
	@$(WITH_UCX) $(BIN)/pytest $(SHARED_OUT) $(PYTEST_ARGS)

$(DEPENDENCIES): pyproject.toml
	@for tool in cargo cc; do command -v $$tool >/dev/null || { echo "pdkv needs \`$$tool\` to build" >&2; exit 1; }; done
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'pdkv needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)' >&2; exit 1; }
	@echo 'creating $(VENV) with the development tools'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"], sep="\n")' \
		| $(BIN)/pip install --quiet --disable-pip-version-check --requirement /dev/stdin
	@touch $@

# Installs a group of wheels that pyproject.toml pins, without what they depend on. Where they cannot be had the tests with them are
# skipped and say so, unless CI insists.
define ADD_WHEELS
	@echo 'adding wheels with $(1) to $(VENV)'
	@$(BIN)/python -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["$(2)"], sep="\n")' \
		| $(BIN)/pip install --quiet --disable-pip-version-check --retries 5 --no-deps --requirement /dev/stdin \
		&& touch $@ || { echo 'no wheels with $(1) could be installed: tests with them are skipped' >&2; \
			[ "$${$(3):-}" != 1 ]; }
endef

# Two more copies of UCX, of other versions than the system's. Without their dependencies: NIXL's would be torch.
$(UCX_WHEELS): $(DEPENDENCIES)
	$(call ADD_WHEELS,UCX,ucx-copies,PDKV_UCX_REQUIRED)

$(NVRTC_WHEELS): $(DEPENDENCIES)
	$(call ADD_WHEELS,NVRTC,nvrtc,PDKV_NVRTC_REQUIRED)

$(NVCC_WHEELS): $(DEPENDENCIES)
	$(call ADD_WHEELS,nvcc,nvcc,PDKV_NVCC_REQUIRED)
