# Every target builds .venv if it is missing and is quick when it is there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RESULTS := benchmarks/results

.PHONY: demo test test-nightly test-gpu test-engines mutants lint format docs bench clean

# torch is pinned by constraints.txt: an open range resolves to a CUDA build of several gigabytes.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,bench]'
	touch $(READY)

demo: $(READY)
	$(BIN)/tieline inspect --html report.html

# One process per core with one thread each: small tensors gain nothing from threads. Bytecode is kept,
# whatever the environment says: tests start many processes, and each would compile the package again.
test test-nightly: export PYTHONDONTWRITEBYTECODE :=
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal --durations=20

# The same laws on 500 random examples each instead of 12 fixed ones.
test-nightly: $(READY)
	HYPOTHESIS_PROFILE=nightly OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

# Runs budgets of waiting and the front door on the pretended device, then GPU_TESTS and the ratios of the
# layer on DEVICE: an accelerator of this machine if there is one, else the pretended one.
DEVICE ?= $(shell $(BIN)/python -c "import torch; a = torch.accelerator; print(a.current_accelerator().type if a.is_available() else 'fake')")
GPU_TESTS ?= $(addprefix tests/,routing measure run models trace analysis)
GPU_ROUNDS ?= 24
test-gpu: $(READY)
	$(BIN)/python -m pytest --device fake tests/device
	$(BIN)/python -m pytest --device $(DEVICE) $(GPU_TESTS) -ra
	PYTHONPATH=src:. $(BIN)/python benchmarks/moe_layer.py --quick --rounds $(GPU_ROUNDS) --shape 0 --device $(DEVICE)

# Breaks the source in known ways, one after the other; every one must make a test fail.
mutants: $(READY)
	$(BIN)/python tools/mutants.py --root . --python $(BIN)/python

# Installs vLLM, MLX and llama.cpp into the cache folder, about 4 GB; says so first.
test-engines: $(READY)
	$(BIN)/python -m tools.install_engines
	TIELINE_TEST_ENGINES=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/engines -v

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(READY)
	mkdir -p $(RESULTS)
	$(BIN)/python benchmarks/moe_layer.py --json $(RESULTS)/moe_layer.json
	$(BIN)/python benchmarks/attention.py --json $(RESULTS)/attention.json
	$(BIN)/python benchmarks/capture.py --json $(RESULTS)/capture.json
	$(BIN)/python benchmarks/replay.py --json $(RESULTS)/replay.json
	$(BIN)/python benchmarks/routes_check.py --json $(RESULTS)/routes_check.json
	$(BIN)/python benchmarks/check_corpus.py held-out --json $(RESULTS)/check_corpus.json
	$(BIN)/python benchmarks/growth.py --json $(RESULTS)/growth.json
	$(BIN)/python benchmarks/forwards.py --json $(RESULTS)/forwards.json
	$(BIN)/python benchmarks/predictions.py --json $(RESULTS)/predictions.json
	$(BIN)/python benchmarks/verdicts.py --json $(RESULTS)/verdicts.json
	$(BIN)/python benchmarks/geometry.py --json $(RESULTS)/geometry.json
	$(BIN)/python benchmarks/tropical.py --json $(RESULTS)/tropical.json
	$(BIN)/python benchmarks/monitor.py --json $(RESULTS)/monitor.json
	$(BIN)/python benchmarks/smooth.py --json $(RESULTS)/smooth.json
	$(BIN)/python benchmarks/experts_kernel.py --json $(RESULTS)/experts_kernel.json
	$(BIN)/python benchmarks/estimation.py --json $(RESULTS)/estimation.json
	$(BIN)/python benchmarks/regressor.py --json $(RESULTS)/regressor.json
	$(BIN)/python benchmarks/peers.py --json $(RESULTS)/peers.json
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --numprocesses auto

clean:
	rm -rf $(VENV) site report.html
