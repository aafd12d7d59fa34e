# make demo, make test: set up on first use (a .venv with pinned packages), then do the work.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.layerplan-$(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
# a python3.12 on the PATH may be a shim that does not run: take the first that does
FIND_PYTHON = for p in python3.12 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.12.*/bin/python; do \
	if "$$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then echo "$$p"; exit 0; fi; done; exit 1

.PHONY: setup demo test lint gpu-test
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@python=$$($(FIND_PYTHON)) || { echo "layerplan needs Python 3.12: put a python3.12 that runs on the PATH, or install one with pyenv" >&2; exit 1; }; \
	if [ ! -x $(PY) ]; then "$$python" -m venv $(VENV); fi
	$(PY) -m pip install -q -c constraints.txt setuptools wheel
	$(PY) -m pip install -q -c constraints.txt --no-build-isolation -e '.[megatron,train,dev]'
	@rm -f $(VENV)/.layerplan-*
	@touch $(STAMP)

demo: setup
	$(VENV)/bin/layerplan demo

lint: setup
	$(VENV)/bin/ruff check .

test: lint
	$(PY) -m pytest tests/cpu tests/multi -n 2 --dist loadfile -q

gpu-test: # on a machine with a GPU and torch: python3 of the machine, nothing installed
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} python3 -m pytest tests/gpu -q
