# make demo    builds everything, fetches a model of 98 MB once, lets it answer a question and says what drafting was worth
#              (PROMPT=file: the embedded model goes on from it; DEMO=options of dflash-run)
# make test    builds everything and runs the tests
# make lint    style, types and the order of the packages
# make build   rebuilds after a change of C, CMake or patch files (Python files need no rebuild)
# make dist    sdist and wheel under dist/, checked: contents, offline build from the sdist, import
# Everything is set up in .venv. Nothing but Python >= 3.10 and a C and C++ compiler has to be there before.

PYTHON ?= python3
PROMPT ?=
# processes that make test runs tests in; 0: none beside pytest, as for a debugger
JOBS ?= 2
DEMO ?=
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
# the editable install reads Python files from src/: only these need a new build
# the folder itself counts too: a patch that is gone must go from the build
BUILD_INPUTS := pyproject.toml CMakeLists.txt patches $(wildcard cmake/* patches/*.patch) \
	$(wildcard src/dflash_ggml/ggml/bindings/cdef/*.h src/dflash_ggml/ggml/bindings/shims.* src/dflash_ggml/ggml/bindings/build_ffi.py) \
	$(wildcard src/dflash_ggml/decode/native/*.[ch] src/dflash_ggml/decode/native/build_ffi.py)

.PHONY: demo test lint build dist clean

demo: $(VENV)/.installed
	@$(VENV)/bin/python tools/demo.py $(if $(PROMPT),--prompt $(PROMPT)) $(DEMO)

test: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest --quiet tests/test_import_order.py

build: $(VENV)/.installed

dist:
	$(PYTHON) tools/check_dist.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python $(BUILD_INPUTS)
	$(PIP) install --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/bin/python $(BUILD_INPUTS)
	$(PIP) install --editable ".[test,lint]"
	$(PIP) install --no-deps llama-index-llms-llama-cpp==0.7.0 # it requires llama-cpp-python itself, which ours stands in for
	touch $@ $(VENV)/.installed

clean:
	rm -rf build dist vendor $(VENV)
