# Two commands: `make demo` trains privately on real data, `make test` runs the checks and tests that a person waits for.
# `make test-all` runs every test; `make docs` builds build/site, `make wheel` a wheel in build/wheel.
# All make a virtual environment in .venv first. PYTHON and TORCH may be set on the command line.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin

.PHONY: demo test test-all check docs wheel benchmark clean

.venv/ready: pyproject.toml setup.py $(wildcard csrc/*.* csrc/*/*.*)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[test,docs]"
	touch .venv/ready

demo: .venv/ready
	$(BIN)/python -m fastdp demo

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# two processes of one thread each (more threads than cores wait for each other), a file in one of them
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test: check docs
	$(PYTEST) -m "not slow"

test-all: test wheel  # and the tests marked slow, and the wheel in a clean environment
	$(PYTEST) -m slow
	PYTHON=$(PYTHON) TORCH="$(TORCH)" .ci/try build/wheel/fastdp-*.whl built

wheel: FASTDP_CUDA ?= $(if $(shell command -v nvcc),1)
wheel: .venv/ready  # with CPU kernels, and CUDA kernels where nvcc is (FASTDP_CUDA=0: without)
	rm -rf build/wheel build/lib* build/bdist*
	FASTDP_CPU=1 $(if $(FASTDP_CUDA),FASTDP_CUDA=$(FASTDP_CUDA)) $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .

benchmark: .venv/ready
	$(BIN)/python -m benchmarks.kernels
	$(BIN)/python -m benchmarks.training

clean:
	rm -rf .venv build fastdp/_C*.so fastdp-demo
