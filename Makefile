# make demo, make test, make notebooks: each makes .venv and installs what it needs, from nothing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check notebooks clean

.venv/demo: pyproject.toml
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

.venv/test: pyproject.toml
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@ .venv/demo

.venv/notebooks: pyproject.toml
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[notebooks]'
	touch $@ .venv/demo

demo: .venv/demo
	$(BIN)/kimi-jax demo

check: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck launch/*.sh launch/slurm.sbatch

test: check
	$(BIN)/python -m pytest --numprocesses 2

notebooks: .venv/notebooks
	JAX_PLATFORMS=cpu $(BIN)/jupyter nbconvert --to notebook --execute --inplace \
		--ExecutePreprocessor.record_timing=False --ClearMetadataPreprocessor.enabled=True \
		--ClearMetadataPreprocessor.preserve_nb_metadata_mask=kernelspec notebooks/*.ipynb

clean:
	rm -rf .venv
