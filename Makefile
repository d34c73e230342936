# Everything runs in .venv, which the first target that needs it makes: Python >= 3.10 and a C++ compiler are enough.

PYTHON ?= python3
VENV   ?= .venv
# What torch has to be beside what the build asks for, as "torch==2.12.*": when the environment is made.
TORCH  ?=
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Without compiling the 12 000 modules that come along to bytecode: Python does that with those that it imports.
INSTALL := $(PIP) install --quiet --no-compile
# Which it has to be allowed to: each process of the tests would compile PyTorch's anew, two seconds of four.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest bench docs lint sanitize build compile_commands clean

help:
	@echo "make demo         swap real networks, run them on photographs, compare and time them"
	@echo "make test         all tests (those that need a GPU are skipped without one)"
	@echo "make test-oldest  the same with the oldest torch that is supported, built and run in $(OLDEST)"
	@echo "make bench        time ours against PyTorch and cuDNN: layers, then networks (GPU)"
	@echo "make sanitize     every kernel under the four tools of compute-sanitizer, a table of what they say (GPU)"
	@echo "make docs         the documents as a site, with the API from the docstrings: build/docs/index.html"
	@echo "make lint         ruff, mypy, clang-format, include rules, links of the documents"
	@echo "make clean        remove what was built (.venv stays)"
	@echo
	@echo "ARGS goes to the command: make demo ARGS='--network resnet50 --batch 4', make test ARGS='-k winograd'."
	@echo "PYTHON names the interpreter ($(PYTHON)), VENV the environment ($(VENV))."

demo: build
	$(BIN)/fastconv demo $(ARGS)

# A process for each core, up to four: a GPU is shared by them. ARGS='-n 0' for one. Each has tests that follow one
# another, which share fixtures and references, until it has none left and takes of another's.
test: build
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(ARGS)

# In a copy of the tree, with a build and an environment of its own: what is built here stays as it is.
OLDEST_TORCH := $(shell sed -n 's/^dependencies = .*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
OLDEST       := build/torch-$(OLDEST_TORCH)

test-oldest:
	mkdir -p $(OLDEST)
	find $(OLDEST) -mindepth 1 -maxdepth 1 ! -name build ! -name .venv -exec rm -r {} +
	git ls-files -z --cached --others --exclude-standard | tar -c --null --files-from - | tar -x -C $(OLDEST)
	$(MAKE) -C $(OLDEST) test VENV=.venv TORCH="torch==$(OLDEST_TORCH).*"

bench: build
	$(BIN)/fastconv bench layers $(ARGS)
	$(BIN)/fastconv bench networks $(ARGS)

# The first stamp: what the build needs, and torchvision, which names one torch and so must be chosen together with it.
$(VENV)/build.stamp: tools/build/backend.py
	$(PYTHON) tools/build/python_version.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip "setuptools>=77"
	$(BIN)/python tools/build/backend.py | xargs $(INSTALL) torchvision $(TORCH)
	touch $@

# Not isolated: the build uses the torch just installed instead of fetching a second one.
$(VENV)/install.stamp: $(VENV)/build.stamp pyproject.toml
	@echo "Compiling, once: 5 to 10 minutes on 2 cores, half a minute with FASTCONV_CUDA=0"
	$(INSTALL) --no-build-isolation --editable ".[test]"
	touch $@

$(VENV)/lint.stamp: $(VENV)/install.stamp
	$(INSTALL) --group dev
	touch $@

$(VENV)/docs.stamp: $(VENV)/install.stamp
	$(INSTALL) --group docs
	touch $@

# Incremental: ninja looks at every source each time.
build compile_commands: $(VENV)/install.stamp
	$(BIN)/python setup.py --quiet build_ext --inplace

lint: $(VENV)/lint.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers auto
	find csrc examples tests/native -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/python tools/check_includes.py
	$(BIN)/python tools/check_docs.py

# Every warning is an error: a page that is nowhere linked, a link that leads nowhere, a docstring that cannot be read.
docs: $(VENV)/docs.stamp build
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs

# Each algorithm under each tool, in a process of its own; ARGS='--only winograd_f4 --tools racecheck' for less.
sanitize: build
	$(BIN)/python tools/sanitize.py $(ARGS)

clean:
	rm -rf build dist *.egg-info fastconv/*.so fastconv/build.json compile_commands.json
	rm -f $(VENV)/install.stamp $(VENV)/lint.stamp $(VENV)/docs.stamp
