# `make train`: the main job. `make test`: everything that must hold. Both set up .venv themselves.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

NATIVE := CMakeLists.txt $(wildcard csrc/*)

.PHONY: train test test-reference lint format lab-demo needs-root kill-points fuzz soak clean

train: .venv/train.stamp
	$(BIN)/compressed-ddp compare --config configs/digits.yaml --ratios 1,0.01

# Everything with the C++ kernels; then what calls kernels itself again with the torch ones. (What stands on
# top of them finds the same bits: test_same_bits.py, test_kernels.py.)
# Tests of one process run two at a time, those of the application two files at a time; others alone.
AGAIN := golden property/test_laws.py $(foreach what,compressors collectives wire state guard,unit/test_$(what).py)
test: lint
	$(BIN)/python -m pytest -n 2 tests/unit tests/property tests/golden tests/test_*.py
	$(BIN)/python -m pytest tests/distributed tests/lab
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/app
	COMPRESSED_DDP_KERNELS=reference $(BIN)/python -m pytest -n 2 $(addprefix tests/,$(AGAIN))

# The same the other way round: everything with the torch kernels.
test-reference: lint
	COMPRESSED_DDP_KERNELS=reference $(BIN)/python -m pytest

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# As root, about seven minutes: eight hosts on 1 Gbit/s links, what plain DDP, torch's hooks and ours make of
# ResNet-50's gradients. Rows in lab-demo.csv.
lab-demo: needs-root .venv/train.stamp
	$(BIN)/compressed-ddp lab run --hosts 8 --rate 1gbit --model resnet50 --compute 50ms --steps 2 \
	  --methods none,plain,fp16,bf16,powersgd-1,writeup-sparse,ours-allgather-int8,ours-sharded-int8,ours-sharded-int4 \
	  --out lab-demo.csv

# First of all, so that nobody waits for a setup in vain.
needs-root:
	@test "$$(id -u)" = 0 || \
	  { echo 'this needs root (network namespaces): sudo env "PATH=$$PATH" make lab-demo' >&2; exit 1; }

# About a quarter of an hour: kill -9 while checkpoints are written, 100 times at random and once before each
# operation on a file. Rows in results/kill_points.csv.
kill-points: .venv/train.stamp
	$(BIN)/python experiments/kill_points.py

# Every decoder under a coverage-guided fuzzer, about half an hour; needs clang with libFuzzer, and says so where
# it is missing. Rows in results/fuzz.csv; `make test` has the short version. docs/fuzzing.md.
fuzz: .venv/fuzz.stamp
	$(BIN)/python experiments/fuzzing.py

# Synchronisers closed, forgotten and destroyed at random moments (minutes); then an hour at a quarter of a
# core with four workers, kills, overflows, other buckets. docs/soak.md
soak: .venv/train.stamp
	$(BIN)/python experiments/stress.py
	$(BIN)/python experiments/soak.py

# torch comes first and alone, so that pip takes exactly the pinned build.
.venv/torch.stamp: constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch
	@touch $@

.venv/train.stamp: .venv/torch.stamp pyproject.toml $(NATIVE)
	$(PIP) --editable '.[train,plots]'
	@touch $@

.venv/dev.stamp: .venv/torch.stamp pyproject.toml $(NATIVE)
	$(PIP) --editable '.[dev]'
	@touch $@

.venv/fuzz.stamp: .venv/train.stamp
	$(PIP) --editable '.[fuzz]'
	@touch $@

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
