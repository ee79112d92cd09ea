# `make demo` and `make test` work on a fresh machine with Python 3.10 to 3.13 and a C++ compiler.
PYTHON ?= python3
VENV ?= .venv
DOCS_VENV ?= .venv-docs
WHEEL_VENV ?= .venv-wheel
WHEELS_VENV ?= .venv-wheels
PEERS ?= .peers
EXTRAS ?= test
# Of the machine with the rented GPU.
GPU_PYTHON ?= python3.12
# Macros of csrc/cuda/hopper/config.cuh whose instances it times against the default.
VARIANTS ?= TXL_TWO_WARPGROUPS
BIN := $(VENV)/bin
SOURCES := $(shell find csrc -type f)
PARALLEL := -n auto
# Skips what has passed with the same code (tests/support/proofs.py).
PROOFS ?= -p proofs
INTERPRETED ?= tests/txl_kernels/api tests/txl_kernels/triton

.PHONY: help demo test test-slow test-interpreter test-integrations test-nightly peers aot lint gpu-kit bench bench-compare report docs wheel wheels clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | while IFS="$$(printf '\t')" read -r target what; do \
		printf '  make %-17s %s\n' "$$target" "$$what"; done

demo: $(VENV)/installed ## a small model trained on 2 cores, what memory and caching are worth: five minutes with the installation
	$(BIN)/txl demo --run runs/demo-$$(date +%Y%m%d-%H%M%S)

test: $(VENV)/installed ## the tests that need neither a GPU nor other libraries, in a few minutes
	OMP_NUM_THREADS=1 $(BIN)/pytest tests --ignore tests/integrations -m "not slow and not nightly and not triton and not gpu" $(PARALLEL)

test-slow: $(VENV)/installed ## tests that take long: processes, compilers, GPU code on a CPU, planted faults, sanitizers
	PYTHONPATH=tests/support OMP_NUM_THREADS=1 $(BIN)/pytest tests --ignore tests/integrations -m "slow and not nightly" $(PROOFS) $(PARALLEL)

test-interpreter: $(VENV)/installed ## tests of the Triton kernels, in Triton's interpreter: their own, and every backend's
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/pytest $(INTERPRETED) -m triton --backends triton $(PARALLEL)

test-integrations: $(VENV)/installed $(PEERS)/installed ## other libraries' attention layers, accelerated, against themselves
	PEERS=$(PEERS) OMP_NUM_THREADS=1 $(BIN)/pytest tests/integrations -m "not nightly" $(PARALLEL)

test-nightly: $(VENV)/installed $(PEERS)/installed ## tests marked nightly, of both
	OMP_NUM_THREADS=1 $(BIN)/pytest tests --ignore tests/integrations -m nightly $(PARALLEL)
	PEERS=$(PEERS) OMP_NUM_THREADS=1 $(BIN)/pytest tests/integrations -m nightly $(PARALLEL)

peers: $(PEERS)/installed ## the other libraries, in a folder of their own (500 MB)

$(PEERS)/installed: tests/integrations/peers.txt | $(VENV)/installed
	$(BIN)/python tools/get_peers.py $(PEERS)
	touch $@

aot: $(VENV)/installed ## compile the GPU kernels without a GPU; compare with tools/machine_code.json
	$(BIN)/python tools/machine_code.py

gpu-kit: gpu-kit/site ## what a rented GPU needs for tools/gpu_steps.py, in gpu-kit/; no GPU needed
	git describe --always --dirty --abbrev=10 --exclude '*' > gpu-kit/commit
	$(MAKE) $(foreach build,default $(VARIANTS),gpu-kit/builds/$(build) gpu-kit/tested/$(build)) || echo "no compiled modules"
	du -sh gpu-kit/*

# Only pure Python: the device's may be another.
gpu-kit/site: | $(VENV)/installed
	$(BIN)/pip install -q --no-deps --target $@ pytest-timeout pytest-xdist execnet pytest-benchmark py-cpuinfo

# `default`, or with the instances that a macro chooses in csrc/cuda/hopper/config.cuh, which no device has timed. Those
# of gpu-kit/tested end a wait of two billion clocks, about a second, with an error.
define build_for_gpu
	rm -rf $@ build/$@
	TXL_KERNELS_CUDA=on CMAKE_ARGS="-DCMAKE_CUDA_ARCHITECTURES=90a-real -DCMAKE_CUDA_FLAGS=$(patsubst %,-D%,$(filter TXL_%,$*)) $(CLOCK_LIMIT)" \
		$(GPU_PYTHON) -m pip wheel -q --no-deps -w build/$@ .
	$(GPU_PYTHON) -m zipfile -e build/$@/*.whl build/$@/files
	mkdir -p $@
	cp build/$@/files/txl_kernels/*.so $@
endef

gpu-kit/builds/%: $(SOURCES) CMakeLists.txt setup.py
	$(build_for_gpu)

gpu-kit/tested/%: CLOCK_LIMIT = -DTXL_CLOCK_LIMIT=2000000000
gpu-kit/tested/%: $(SOURCES) CMakeLists.txt setup.py
	$(build_for_gpu)

bench: $(VENV)/installed ## every benchmark
	$(BIN)/pytest benchmarks/ --benchmark-only

bench-compare: $(VENV)/installed ## BASE=main: is the working tree slower than another revision?
	@test -n "$(BASE)" || { echo "usage: make bench-compare BASE=<revision>" >&2; exit 2; }
	$(BIN)/pytest benchmarks/ --benchmark-only --base="$(BASE)" $(ARGS)

report: $(VENV)/installed ## benchmarks/REPORT.md and the figures of README and docs, from benchmarks/results/
	PYTHONPATH=benchmarks $(BIN)/python -m report

lint: $(VENV)/installed ## ruff, mypy, layers of imports, clang-format; whether the report fits its records
	$(BIN)/pip install -q -r requirements-lint.txt
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/clang-format --dry-run -Werror $(SOURCES) tests/txl_kernels/cpu/driver.cpp tests/txl_kernels/cpu/threads.cpp tests/txl_kernels/cpu/program.c tests/txl_kernels/cuda/driver.cpp tests/txl_kernels/cuda/*.h tests/txl_kernels/cuda/ptx_launch/*
	PYTHONPATH=benchmarks $(BIN)/python -m report --check

# The documentation, site/index.html. Its tools get an environment of their own, without torch.
docs: ## the documentation site, in site/ (Python 3.11 or newer)
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install -q -r requirements-docs.txt
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

# WHEEL_ARGS: see tools/build_wheel.py. With nvcc (CUDA 12.8 or newer) it has the CUDA kernels, too.
wheel: ## one wheel for Linux x86-64 and every Python at hand, in dist/
	test -x $(WHEEL_VENV)/bin/python || $(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/pip install -q -r requirements-wheel.txt
	$(WHEEL_VENV)/bin/python tools/build_wheel.py $(WHEEL_ARGS)

# For Linux on aarch64, where it needs docker, and macOS. Tested with torch once built.
wheels: ## wheels for Linux aarch64 or macOS, one for every Python, in dist/
	test -x $(WHEELS_VENV)/bin/python || $(PYTHON) -m venv $(WHEELS_VENV)
	$(WHEELS_VENV)/bin/pip install -q cibuildwheel==4.3.3
	$(WHEELS_VENV)/bin/cibuildwheel --output-dir dist

# torch first: whatever depends on it must find this one and not fetch another.
$(VENV)/installed: requirements.txt pyproject.toml setup.py CMakeLists.txt $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "$$(grep ^torch== requirements.txt)"
	$(BIN)/pip install -q -r requirements.txt
	TXL_KERNELS_EMULATED=on $(BIN)/pip install -q -e ".[$(EXTRAS)]"
	touch $@

clean: ## remove the environments, what was built, and runs/
	rm -rf $(VENV) $(PEERS) $(DOCS_VENV) $(WHEEL_VENV) $(WHEELS_VENV) build dist gpu-check gpu-kit runs site *.egg-info txl_kernels/_native* txl_kernels/_cuda* txl_kernels/libtxl_*
