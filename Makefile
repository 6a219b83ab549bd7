# Everything a contributor runs. A fresh clone needs only Python (3.11 or newer) and make.
#   PYTHON  the interpreter that the environment is made with; not given: that of an existing environment, else python3
#   VENV    where the environment lies
#   TESTS   for `make test`: some of them, or more arguments of pytest
VENV ?= .venv
BIN := $(VENV)/bin
ifeq ($(origin PYTHON), undefined)
PYTHON := $(shell $(BIN)/python -c "print('$(BIN)/python')" 2>/dev/null || echo python3)
endif

# The version is part of the stamp's name: another interpreter makes another environment in the same place.
VERSION := $(shell $(PYTHON) -c "import sys; print('%d.%d.%d' % sys.version_info[:3])" 2>/dev/null)
STAMP := $(VENV)/.installed-$(VERSION)
TORCH_STAMP := .venv-torch/.installed
OLDEST_STAMP := .venv-oldest/.installed
TORCH_IMPORTS_STAMP := .venv-torch/.installed-imports
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# One more than the two processors that are asked for: a third of its time a test waits, for a disk or another process.
WORKERS ?= 3
# In the order of the files: by default those with few tests, which are the long ones, would come last, for one worker.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-unit test-nightly test-oldest test-distributed lint types format bench bench-jobs bench-quick bench-torch bench-accelerator torch-imports kill-campaign crash-states block-replay corruption power-cuts native-calls random-kills boundaries limits many-processes deadlines hostile soak test-faults bench-faults bench-write-modes scale docs docs-plots clean python-is-new-enough

help:  ## list what can be made
	@sed -n 's/^\([a-z][a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name what; do printf '  make %-12s %s\n' "$$name" "$$what"; done

python-is-new-enough:
	@if [ -z "$(VERSION)" ]; then echo "PYTHON=$(PYTHON) cannot be run: install Python 3.11 or newer, or name one by PYTHON=..." >&2; exit 1; fi
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "PYTHON=$(PYTHON) is $(VERSION), and 3.11 or newer is needed: name one by PYTHON=..." >&2; exit 1; }

# The plugin's file is copied by an editable install, so a change of it is a reason to install anew.
$(STAMP): pyproject.toml constraints.txt jaxckpt_train/integrations/hydra_search_path.py | python-is-new-enough
	@if [ "$$($(BIN)/python -c "import sys; print('%d.%d.%d' % sys.version_info[:3])" 2>/dev/null)" != "$(VERSION)" ]; then \
		echo "making $(VENV) with Python $(VERSION)"; $(PYTHON) -m venv --clear $(VENV); fi
	$(PIP) install -c constraints.txt -e '.[all,test,dev,bench,docs]'
	@rm -f $(VENV)/.installed-*; touch $@

venv: $(STAMP)  ## the environment with everything that the other targets need

demo: $(STAMP)  ## a training that is preempted again and again, compared with one that is not
	$(BIN)/python examples/demo.py

test: $(STAMP)  ## the unit and the integration tests
	$(PYTEST) $(TESTS)

test-unit: $(STAMP)  ## the unit tests, which start no process
	$(PYTEST) tests/unit

test-nightly: $(STAMP)  ## faults, crashes, kills, browsers, and more cases of the integration tests; TESTS for some of them
	$(PYTEST) -m nightly $(or $(TESTS),tests)

# What depends on the versions of JAX, NumPy, Flax and typer.
OLDEST_TESTS ?= tests/unit/checkpointables tests/integration/checkpointables tests/unit/cli/test_show.py tests/unit/cli/test_verify.py tests/unit/test_checkpoint.py tests/unit/test_callback.py $(patsubst %,tests/unit/pytree/test_%.py,flatten restore placement target mismatch rebuild caller_context snapshot snapshot_modes restore_parts leaf_records)
test-oldest: $(OLDEST_STAMP)  ## tests with the oldest JAX, NumPy and Flax that are supported
	.venv-oldest/bin/python -m pytest -n $(WORKERS) --dist loadfile $(OLDEST_TESTS)

$(OLDEST_STAMP): pyproject.toml constraints-oldest.txt | python-is-new-enough
	$(PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/python -m pip --disable-pip-version-check --quiet install -c constraints-oldest.txt -e '.[flax,grain,hydra,blake3,orbax,test]'
	touch $@

test-distributed: $(STAMP)  ## jobs of many real processes in full, and 80 stops of one of them (half an hour)
	$(PYTEST) -m 'nightly or not nightly' tests/integration/distributed tests/nightly/distributed
	$(BIN)/python -m tests.nightly.distributed.stops --trials 20

lint: $(STAMP)  ## style, imports, formatting, and words to avoid
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory language

# Files and folders without banned words; the list grows as more of them are cleaned.
LANGUAGE_PATHS := README.md CHANGELOG.md examples CITATION.cff CONTRIBUTING.md SECURITY.md .ci .github .pre-commit-config.yaml pyproject.toml configs tools \
	docs mkdocs.yml benchmarks/README.md \
	jaxckpt_train/callback.py jaxckpt_train/config.py jaxckpt_train/distributed jaxckpt_train/loop.py \
	tests/unit/test_check_language.py tests/integration/docs/test_api_reference.py tests/integration/docs/test_repository_files.py \
	tests/integration/examples tests/integration/testing tests/nightly/integrations
.PHONY: language
language: $(STAMP)  ## look for words that the project's texts avoid
	$(BIN)/python tools/check_language.py $(LANGUAGE_PATHS)

format: $(STAMP)  ## put the code in the form that `make lint` wants
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)  ## strict type check of the package, for Linux and for macOS
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin

kill-campaign: $(STAMP)  ## SIGKILL at 60 random moments of a training that saves every step
	$(BIN)/python -m tests.nightly.kill.campaign --kills 60

crash-states: $(STAMP)  ## what a million power cuts may leave of a disk: every promise is kept in each (an hour or two)
	$(BIN)/python -m tests.nightly.crash.explorer --states 1000000

block-replay: $(STAMP)  ## what 20,000 power cuts may leave of the blocks of an ext4 and an xfs (some half an hour; needs root)
	$(BIN)/python -m tests.nightly.faults.block_replay --states 20000

corruption: $(STAMP)  ## 100,000 damaged checkpoints: none is loaded, and the step before is restored (some twenty minutes)
	$(BIN)/python -m tests.nightly.faults.corruption --trials 100000

power-cuts: $(STAMP)  ## 2,000 power cuts of each real file system on loop devices (needs root)
	$(BIN)/python -m tests.nightly.faults.power_cut --trials 2000

native-calls: $(STAMP)  ## every native call of some programs fails, falls short, or is its last; writers with flaws are found out (an hour or two; needs a C compiler)
	$(BIN)/python -m tests.nightly.faults.native_calls
	$(BIN)/python -m tests.nightly.faults.native_calls --controls

limits: $(STAMP)  ## full and read-only disks, limits of files, descriptors and memory
	$(BIN)/python -m tests.nightly.faults.limits

deadlines: $(STAMP)  ## 300 jobs with little time on a slow disk (some forty minutes; needs root)
	$(BIN)/python -m tests.nightly.faults.deadline --trials 300

hostile: $(STAMP)  ## 20,000,000 files that somebody else made, and as many that atheris chooses (an hour or two)
	$(BIN)/python -m tests.nightly.faults.hostile --executions 20000000
	$(BIN)/python -m tests.nightly.faults.hostile --atheris --executions 20000000

soak: $(STAMP)  ## an hour of training on a disk that is slow, refuses, or does not answer at times (needs root)
	$(BIN)/python -m tests.nightly.faults.soak --minutes 60

boundaries: $(STAMP)  ## a training that ends at each call on a file that Python knows of (some ten minutes)
	$(BIN)/python -m tests.nightly.faults.boundaries

random-kills: $(STAMP)  ## SIGKILL at 5,000 random moments of processes that save (some twelve minutes)
	$(BIN)/python -m tests.nightly.faults.random_kills

many-processes: $(STAMP)  ## processes that own, read, pin and die on one directory: against a model, and real ones
	$(BIN)/python -m tests.nightly.faults.owners
	$(BIN)/python -m tests.nightly.faults.many_processes

# What cannot run on a machine says SKIP and why; a campaign that cannot run at all leaves with 77, and make fails for it.
# ARGS: such as ARGS="--share 0.01 --only soak,limits"
test-faults: $(STAMP)  ## all campaigns of faults, and their table in build/reliability.md (many hours; parts need root)
	$(BIN)/python -m tests.nightly.faults.everything $(ARGS)

bench-accelerator: $(STAMP)  ## saves and loads of a training on the device that JAX chooses, compared with Orbax (six minutes)
	$(BIN)/python -m benchmarks.accelerator --json build/accelerator.json --page build $(ARGS)

bench-faults: $(STAMP)  ## power cuts, flipped bits and interrupted calls on Orbax beside ours (some ten minutes; needs root)
	$(BIN)/python -m benchmarks.faults

bench-write-modes: $(STAMP)  ## what each durability costs, on each file system that there is
	$(BIN)/python -m benchmarks.write_modes

bench: $(STAMP)  ## compare with all peers on this machine (some two hours), and write docs/benchmarks/
	$(BIN)/python -m benchmarks.run --json build/bench.json --plots docs/benchmarks

bench-jobs: $(STAMP)  ## saves and loads by jobs of several processes (some twenty-five minutes; needs root)
	$(BIN)/python -m benchmarks.jobs --json build/bench-jobs.json --page docs/benchmarks

.PHONY: bench-goodput bench-overhead
bench-goodput: $(STAMP)  ## trainings that are killed again and again, kept by ours and by Orbax (some eighty minutes)
	$(BIN)/python -m benchmarks.goodput --json build/bench-goodput.json --page docs/benchmarks

bench-overhead: $(STAMP)  ## what a budget for saves really costs, on fast and slow disks (some twenty-five minutes; needs root)
	$(BIN)/python -m benchmarks.overhead_budget --json build/bench-overhead.json --page docs/benchmarks

.PHONY: bench-tools
bench-tools: $(STAMP)  ## what imports, diffs and looks cost, beside Orbax and the disk (some ten minutes)
	$(BIN)/python -m benchmarks.tools --json build/bench-tools.json --page docs/benchmarks

bench-quick: $(STAMP)  ## less of the same in a few minutes
	$(BIN)/python -m benchmarks.run --quick --json build/bench-quick.json --plots build/bench-quick

# PyTorch has an environment of its own: it takes several GB, and the subjects that need it run in processes of their own.
bench-torch: $(TORCH_STAMP)  ## the environment for the PyTorch peers, some 6 GB; without it they are left out

$(TORCH_STAMP): benchmarks/torch-requirements.txt | python-is-new-enough
	$(PYTHON) -m venv --clear .venv-torch
	.venv-torch/bin/python -m pip --disable-pip-version-check --quiet install -r $<
	touch $@

# The tests that are left out where PyTorch is not installed: in its environment, with this package beside it.
torch-imports: $(TORCH_IMPORTS_STAMP)  ## checkpoints that PyTorch itself has written, alone and in a job of two processes, are read (some 8 GB)
	.venv-torch/bin/python -m pytest tests/unit/formats/test_torch_metadata.py tests/integration/formats/test_torch_loads.py tests/integration/formats/test_torch_jobs.py

$(TORCH_IMPORTS_STAMP): $(TORCH_STAMP) pyproject.toml constraints.txt
	.venv-torch/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt -e '.[all,test]'
	touch $@

# Each version has an environment of its own in build/, which is kept: some 5 GB. ARGS="--only 0.2.7,0.12.8" for some.
.PHONY: orbax-versions
orbax-versions: $(STAMP)  ## checkpoints of twelve versions of the real Orbax are loaded, and exports restored by them (half an hour, then minutes)
	$(BIN)/python -m tests.nightly.formats.orbax_versions $(ARGS)

# Give the file's path: ARGS=path/to/checkpoint_manager_test.py; without it that of the installed Orbax, which has none by default.
.PHONY: orbax-manager-tests
orbax-manager-tests: $(STAMP)  ## Orbax's own tests of its manager, with the manager in Orbax's form (some minutes)
	$(BIN)/python -m tests.nightly.integrations.orbax_manager_suite $(ARGS)

scale: $(STAMP)  ## jobs of up to 100,000 processes, planned and simulated, and JAX's key-value store (some ten minutes)
	$(BIN)/python -m benchmarks.scale

docs: $(STAMP)  ## the site of the documentation, in build/site; a link that leads nowhere fails it
	$(BIN)/python -m mkdocs build --strict

docs-plots: $(STAMP)  ## draw the plots of docs/reference/policies.md anew, from the policies themselves
	$(BIN)/python -m benchmarks.policy_plots

clean:  ## remove everything that was made
	rm -rf $(VENV) .venv-torch build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find jaxckpt_train tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
