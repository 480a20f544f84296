# Everything runs in ./.venv, with the exact versions of constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := $(BIN)/dalsegno
READY  := $(VENV)/.ready
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
PEERS  := .venv-peers

.PHONY: demo test check docs dist bench soak proofs memory rollbacks diloco gpu lies requests peers clean

demo: $(DEMO)
	$(DEMO) demo

test: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(MAKE) --no-print-directory docs

# The documentation site, in build/site. A warning, such as a dead link, is an error (mkdocs.yml).
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# A wheel and an sdist in dist/, installed into an empty environment that reads logs and runs a short demo.
dist: $(READY)
	PYTHONPATH=tests $(BIN)/python -m release.install

# Without its peers the table still comes out, and says which are missing.
bench: $(READY)
	-@$(MAKE) --no-print-directory peers
	$(BIN)/python -m benchmarks

# A thousand kills at random instants: twenty minutes or so; `make soak KILLS=100` is shorter. Then every kind of data,
# interrupted in each of its first epochs.
soak: $(READY)
	PYTHONPATH=tests $(BIN)/python -m durability.soak --kills $(or $(KILLS),1000)
	PYTHONPATH=tests $(BIN)/python -W ignore -m durability.matrix --write

# A kill before each file operation of a rollback: five minutes or so. `make rollbacks EVERY=5` is shorter.
rollbacks: $(READY)
	PYTHONPATH=tests $(BIN)/python -W ignore -m durability.rollbacks --every $(or $(EVERY),1)

# Three hundred kills of healthy runs, alone, with DDP, FSDP2, tensor parallelism and a pipeline: ten minutes or so. Then
# every scenario of state that a checkpoint contains or not: three minutes or so. `make proofs KILLS=50` is shorter.
proofs: $(READY)
	PYTHONPATH=tests $(BIN)/python -W ignore -m durability.proofs --kills $(or $(KILLS),300)
	PYTHONPATH=tests $(BIN)/python -W ignore -m durability.scenarios --write

# A hundred kills of the workers and the server of DiLoCo runs: ten minutes or so. `make diloco KILLS=10` is shorter.
diloco: $(READY)
	PYTHONPATH=tests $(BIN)/python -m durability.diloco --kills $(or $(KILLS),100)

# Kills, saves, waits and memory of runs on this machine's GPU, written to docs/why/gpu.md: six minutes or so.
gpu: $(READY)
	PYTHONPATH=tests $(BIN)/python -W ignore -m durability.device --write

# Three hundred kills of runs that also save in memory, half of them with a frozen layer: five minutes or so.
# `make memory KILLS=30` is shorter.
memory: $(READY)
	PYTHONPATH=tests $(BIN)/python -m durability.memory --kills $(or $(KILLS),300)

# Ten thousand forged checkpoints, loaded: an hour or so. `make lies LIES=500` is shorter.
lies: $(READY)
	PYTHONPATH=tests $(BIN)/python -m durability.lies --lies $(or $(LIES),10000)

# Ten thousand requests to a running job: a minute or so.
requests: $(READY)
	PYTHONPATH=tests $(BIN)/python -m durability.requests --requests $(or $(REQUESTS),10000)

# What the benchmarks are measured beside, in an environment of its own.
peers: $(PEERS)/.ready

$(DEMO): pyproject.toml constraints.txt
	@echo "Installing into $(VENV), once: dalsegno, torch and what they need, about 47 packages."
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[analysis]'

$(READY): $(DEMO)
	@echo "Installing into $(VENV), once: what tests, checks and documentation need, about 140 packages more."
	$(INSTALL) -e '.[dev]'
	touch $@

$(PEERS)/.ready: benchmarks/peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/peers.txt
	touch $@

clean:
	rm -rf $(VENV) $(PEERS)
