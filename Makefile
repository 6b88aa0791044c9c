PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: help demo test test-full lint docs figures experiments model screenshots notebooks clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'

$(VENV)/.core: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): some minutes, and about 1 GB (several where PyTorch comes with CUDA)"
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e .
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[test]'
	@touch $@

demo: $(VENV)/.core  ## install, train a small model on this machine for two minutes, and sample from it
	$(BIN)/esolm demo

lint: $(VENV)/.test  ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## run the tests, except the slow ones
	$(BIN)/pytest -n 3 -m "not slow"  # one more than cores: some tests wait for processes

test-full: lint  ## run all tests
	$(BIN)/pytest -n 2

docs: $(VENV)/.test  ## build the documentation site in site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

figures: $(VENV)/.test  ## draw the figures of docs/concepts.md again
	$(BIN)/python -m website.figures

experiments: $(VENV)/.test  ## needs ESOLM_CORPORA, ESOLM_JUDGE, ESOLM_EMBEDDER and ESOLM_MODELS
	$(BIN)/python -m experiments

model: $(VENV)/.test  ## train, measure and install the bundled model again
	rm -rf experiments/stories/results  # existing results would not be measured again
	$(BIN)/python -m experiments stories
	rm -rf src/esolm/models/stories
	$(BIN)/esolm export workspace/models/stories src/esolm/models/stories --dtype bfloat16 --license mit
	$(BIN)/python -m experiments.stories.report >> src/esolm/models/stories/README.md
	cp experiments/stories/LICENSE src/esolm/models/stories

screenshots: $(VENV)/.test  ## take the pictures of docs/serving.md again, with MODEL=stories
	PYTHONPATH=tests $(BIN)/python -m support.screenshots $(or $(MODEL),stories)

notebooks: $(VENV)/.test  ## run the notebooks of examples/ again and save their outputs; NOTEBOOK=2-stories runs one
	PYTHONPATH=tests $(BIN)/python -m support.notebooks $(NOTEBOOK)

clean:  ## remove the environment
	rm -rf $(VENV)
