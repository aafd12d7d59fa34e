# make demo, make test: set up on first use (a .venv with pinned packages), then do the work.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
# the stamp's name holds the content of what was installed: unchanged content sets nothing up again, whatever the file times
STAMP := $(VENV)/.layerplan-$(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
# A python3.12 on the PATH may be a version manager's shim that does not run, or lack venv: take the first that works.
FIND_PYTHON = for p in python3.12 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12.*/bin/python; do \
	if "$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; then echo "$$p"; exit 0; fi; \
	done; exit 1
NO_PYTHON = layerplan needs Python 3.12 (with venv): put a python3.12 that runs on the PATH, or install one with pyenv

.PHONY: setup demo test lint gpu-test
setup: $(STAMP)

$(STAMP):
	@python=$$($(FIND_PYTHON)) || { echo "$(NO_PYTHON)" >&2; exit 1; }; \
	if ! $(PY) -m pip --version >/dev/null 2>&1; then \
		echo "layerplan: making $(VENV) with $$python"; "$$python" -m venv --clear $(VENV); fi
	@echo "layerplan: installing pinned packages into $(VENV), some minutes the first time"
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt setuptools wheel
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[megatron,train,dev]'
	@rm -f $(VENV)/.layerplan-*
	@touch $(STAMP)

demo: setup
	$(VENV)/bin/layerplan demo

lint: setup
	$(VENV)/bin/ruff check .

test: lint
	$(PY) -m pytest tests/cpu tests/multi -n 2 --dist loadfile -q

gpu-test: # on a machine with a GPU: its own python3 with torch and pytest, nothing installed
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} python3 -m tests.gpu.suite --compile --limit 3600
