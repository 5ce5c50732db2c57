# Everything happens in .venv; each target sets up what it needs.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
SOURCES := pyproject.toml CMakeLists.txt $(shell find native -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name 'CMakeLists.txt')

.PHONY: demo test test-% test-native test-numa lint bench clean

demo: .venv/.installed
	$(BIN)/mpiexec -n 3 $(BIN)/hpcdecode generate jobs/demo/prompts.jsonl --model demo -o demo.h5 --overwrite --max-tokens 64
	$(BIN)/hpcdecode show demo.h5

test: .venv/.installed
	$(BIN)/python -m pytest

# The MPI tests on N ranks: make test-3
test-%: .venv/.installed
	HPCDECODE_TEST_RANKS=$* $(BIN)/python -m pytest tests/mpi

test-native: .venv/.installed
	tests/native/run_sanitized.sh

# The NUMA test in an emulated machine of two nodes: make test-numa KERNEL=/path/to/vmlinuz
test-numa:
	tests/native/run_numa_guest.sh $(KERNEL)

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(shell git ls-files '*.cpp' '*.h')

bench: .venv/.installed
	$(BIN)/hpcdecode bench attention
	$(BIN)/hpcdecode bench prefill

clean:
	rm -rf .venv build demo.h5 demo.h5.parts

# torch first and pinned: left to itself pip may take a build with gigabytes of GPU libraries.
.venv/.installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[mpi,test]'
	touch $@
