# The commands of contributors. A fresh clone needs only Python (3.11 or newer) and make.
#   PYTHON  the interpreter of the environment; by default that of an existing environment, otherwise python3
#   VENV    the directory of the environment
#   TESTS   for `make test`: some tests, or more arguments for pytest
VENV ?= .venv
BIN := $(VENV)/bin
ifeq ($(origin PYTHON), undefined)
PYTHON := $(shell $(BIN)/python -c "print('$(BIN)/python')" 2>/dev/null || echo python3)
endif

# The version is part of the stamp's name, so another interpreter replaces the environment.
VERSION := $(shell $(PYTHON) -c "import sys; print('%d.%d.%d' % sys.version_info[:3])" 2>/dev/null)
STAMP := $(VENV)/.installed-$(VERSION)
TORCH_STAMP := .venv-torch/.installed
OLDEST_STAMP := .venv-oldest/.installed
TORCH_IMPORTS_STAMP := .venv-torch/.installed-imports
# One worker more than two processors: a test spends a third of its time waiting for a disk or another process.
WORKERS ?= 3
# Without kept bytecode each worker would rewrite every test, and each process that a test starts compile every module.
unexport PYTHONDONTWRITEBYTECODE
# In the order of the files: by default the files with few tests, which are the long ones, would come last, on one worker.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-unit test-nightly test-oldest test-distributed test-objects lint types format bench bench-jobs bench-quick bench-torch bench-accelerator torch-imports kill-campaign crash-states object-crashes block-replay corruption power-cuts native-calls random-kills boundaries limits many-processes deadlines hostile soak unchanged test-faults bench-faults bench-write-modes scale docs docs-plots clean python-is-new-enough

help:  ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name what; do printf '  make %-20s %s\n' "$$name" "$$what"; done

python-is-new-enough:
	@if [ -z "$(VERSION)" ]; then echo "PYTHON=$(PYTHON) cannot be run: install Python 3.11 or newer, or name one by PYTHON=..." >&2; exit 1; fi
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "PYTHON=$(PYTHON) is $(VERSION), and 3.11 or newer is needed: name one by PYTHON=..." >&2; exit 1; }

# An editable install copies the plugin's file, so a change of it requires a new install.
$(STAMP): pyproject.toml constraints.txt jaxckpt_train/integrations/hydra_search_path.py | python-is-new-enough
	@if [ "$$($(BIN)/python -c "import sys; print('%d.%d.%d' % sys.version_info[:3])" 2>/dev/null)" != "$(VERSION)" ]; then \
		echo "making $(VENV) with Python $(VERSION)"; $(PYTHON) -m venv --clear $(VENV); fi
	.ci/install $(VENV) -c constraints.txt -e '.[all,test,dev,bench,docs]'
	@rm -f $(VENV)/.installed-*; touch $@

venv: $(STAMP)  ## create the environment with everything that the other targets need

# With DIRECTORY=s3://bucket/run the checkpoints are there. Unless AWS_ENDPOINT_URL is set, a server starts for it here.
demo: $(STAMP)  ## preempt a training repeatedly, and compare it with an uninterrupted one; DIRECTORY=s3://... is possible
	$(BIN)/python examples/demo.py $(if $(DIRECTORY),--directory $(DIRECTORY))

test: $(STAMP)  ## run the unit and the integration tests
	$(PYTEST) $(TESTS)

test-unit: $(STAMP)  ## run the unit tests, which start no process
	$(PYTEST) tests/unit

test-nightly: $(STAMP)  ## run faults, crashes, kills, browsers, and more cases of the integration tests; TESTS selects some
	$(PYTEST) -m nightly $(or $(TESTS),tests)

# The tests that depend on the versions of JAX, NumPy, Flax and typer.
OLDEST_TESTS ?= tests/unit/checkpointables tests/integration/checkpointables tests/unit/cli/test_show.py tests/unit/cli/test_verify.py tests/unit/test_checkpoint.py tests/unit/test_callback.py $(patsubst %,tests/unit/pytree/test_%.py,flatten restore placement target mismatch rebuild caller_context snapshot snapshot_modes restore_parts leaf_records)
test-oldest: $(OLDEST_STAMP)  ## run tests with the oldest supported JAX, NumPy and Flax
	.venv-oldest/bin/python -m pytest -n $(WORKERS) --dist loadfile $(OLDEST_TESTS)

$(OLDEST_STAMP): pyproject.toml constraints-oldest.txt | python-is-new-enough
	$(PYTHON) -m venv --clear .venv-oldest
	.ci/install .venv-oldest -c constraints-oldest.txt -e '.[flax,grain,hydra,blake3,orbax,objects,test]'
	touch $@

test-distributed: $(STAMP)  ## run all tests of multi-process jobs, and stop a job 80 times (30 minutes)
	$(PYTEST) -m 'nightly or not nightly' tests/integration/distributed tests/nightly/distributed
	$(BIN)/python -m tests.nightly.distributed.stops --trials 20

test-objects: $(STAMP)  ## run the tests of object stores, also on real servers, which it installs (minutes)
	$(PYTEST) -m 'nightly or not nightly' tests/integration/objects tests/nightly/objects

lint: $(STAMP)  ## check style, imports, formatting, and banned words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory language

# Files and folders without banned words. The list grows as more of them are cleaned.
LANGUAGE_PATHS := README.md CHANGELOG.md CITATION.cff CONTRIBUTING.md SECURITY.md Makefile mkdocs.yml pyproject.toml \
	.ci .github .pre-commit-config.yaml benchmarks configs docs examples jaxckpt_train tests tools
.PHONY: language
language: $(STAMP)  ## look for banned words
	$(BIN)/python tools/check_language.py $(LANGUAGE_PATHS)

format: $(STAMP)  ## format the code as `make lint` requires
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: types-linux types-macos  ## check types strictly, for Linux and macOS
.PHONY: types-linux types-macos
types-linux: $(STAMP)
	$(BIN)/mypy
types-macos: $(STAMP)
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin

kill-campaign: $(STAMP)  ## SIGKILL a training that saves every step at 60 random moments
	$(BIN)/python -m tests.nightly.kill.campaign --kills 60

crash-states: $(STAMP)  ## check every promise in a million states of a disk after a power cut (1 to 2 hours)
	$(BIN)/python -m tests.nightly.crash.explorer --states 1000000

object-crashes: $(STAMP)  ## crash at each request of saves to an object store, and race its owners (1 hour)
	$(BIN)/python -m tests.nightly.objects.crashes
	$(BIN)/python -m tests.nightly.objects.crashes --controls
	$(BIN)/python -m tests.nightly.objects.owners

block-replay: $(STAMP)  ## check 20,000 states of the blocks of an ext4 and an xfs after a power cut (30 minutes; needs root)
	$(BIN)/python -m tests.nightly.faults.block_replay --states 20000

corruption: $(STAMP)  ## damage 100,000 checkpoints: none is loaded, and the previous step is restored (20 minutes)
	$(BIN)/python -m tests.nightly.faults.corruption --trials 100000

power-cuts: $(STAMP)  ## cut the power of each real file system on loop devices 2,000 times (needs root)
	$(BIN)/python -m tests.nightly.faults.power_cut --trials 2000

native-calls: $(STAMP)  ## make every native call of some programs fail, fall short, or be the last (1 to 2 hours; needs a C compiler)
	$(BIN)/python -m tests.nightly.faults.native_calls
	$(BIN)/python -m tests.nightly.faults.native_calls --controls

limits: $(STAMP)  ## run on full and read-only disks, with limits of files, descriptors and memory
	$(BIN)/python -m tests.nightly.faults.limits

deadlines: $(STAMP)  ## run 300 jobs with little time on a slow disk (40 minutes; needs root)
	$(BIN)/python -m tests.nightly.faults.deadline --trials 300

hostile: $(STAMP)  ## read 20,000,000 hostile files, and as many that atheris chooses (1 to 2 hours)
	$(BIN)/python -m tests.nightly.faults.hostile --executions 20000000
	$(BIN)/python -m tests.nightly.faults.hostile --atheris --executions 20000000

soak: $(STAMP)  ## train for an hour on a disk that is slow, refuses, or does not answer at times (needs root)
	$(BIN)/python -m tests.nightly.faults.soak --minutes 60

boundaries: $(STAMP)  ## end a training at each file call that Python makes (10 minutes)
	$(BIN)/python -m tests.nightly.faults.boundaries

random-kills: $(STAMP)  ## SIGKILL processes that save at 5,000 random moments (12 minutes)
	$(BIN)/python -m tests.nightly.faults.random_kills

many-processes: $(STAMP)  ## own, read, pin and die on one directory: against a model, and with real processes
	$(BIN)/python -m tests.nightly.faults.owners
	$(BIN)/python -m tests.nightly.faults.many_processes

unchanged: $(STAMP)  ## save what changes and what does not, and delete or damage files that steps share (1 hour)
	$(BIN)/python -m tests.nightly.unchanged.sequences
	$(BIN)/python -m tests.nightly.unchanged.deletions
	$(BIN)/python -m tests.nightly.unchanged.shared_damage

# A campaign that cannot run on a machine prints SKIP with the reason; run alone, it exits with 77, and make fails.
# For example ARGS="--share 0.01 --only soak,limits", or ARGS="--parts 40 --keep build/campaigns", to be interrupted.
test-faults: $(STAMP)  ## run all fault campaigns, with a table in build/reliability.md (many hours; parts need root)
	$(BIN)/python -m tests.nightly.faults.everything $(ARGS)

bench-accelerator: $(STAMP)  ## compare saves and loads on the device that JAX chooses with Orbax (6 minutes)
	$(BIN)/python -m benchmarks.accelerator --json build/accelerator.json --page build $(ARGS)

bench-faults: $(STAMP)  ## compare power cuts, flipped bits and interrupted calls with Orbax (10 minutes; needs root)
	$(BIN)/python -m benchmarks.faults

bench-write-modes: $(STAMP)  ## measure the cost of each durability on each available file system
	$(BIN)/python -m benchmarks.write_modes

bench: $(STAMP)  ## compare with all other libraries (2 hours), and write docs/benchmarks/
	$(BIN)/python -m benchmarks.run --json build/bench.json --plots docs/benchmarks

bench-jobs: $(STAMP)  ## measure saves and loads of multi-process jobs (25 minutes; needs root)
	$(BIN)/python -m benchmarks.jobs --json build/bench-jobs.json --page docs/benchmarks

.PHONY: bench-goodput bench-overhead
bench-goodput: $(STAMP)  ## kill trainings repeatedly, with our saves and with those of Orbax (80 minutes)
	$(BIN)/python -m benchmarks.goodput --json build/bench-goodput.json --page docs/benchmarks

bench-overhead: $(STAMP)  ## measure the real cost of an overhead budget on fast and slow disks (25 minutes; needs root)
	$(BIN)/python -m benchmarks.overhead_budget --json build/bench-overhead.json --page docs/benchmarks

.PHONY: bench-tools
bench-tools: $(STAMP)  ## measure imports, diffs and commands (10 minutes)
	$(BIN)/python -m benchmarks.tools --json build/bench-tools.json --page docs/benchmarks

.PHONY: bench-objects
bench-objects: $(STAMP)  ## compare saves to an object server on loopback with obstore alone, PyTorch DCP and Orbax (40 minutes)
	$(BIN)/python -m benchmarks.objects --json build/bench-objects.json --page docs/benchmarks

.PHONY: bench-gcs
bench-gcs: $(STAMP)  ## add what Orbax needs to save to Google Cloud Storage; without it bench-objects leaves Orbax out
	.ci/install $(VENV) -c constraints.txt 'gcsfs>=2026.7'

.PHONY: bench-unchanged
bench-unchanged: $(STAMP)  ## compare saves of a state of which little changes with Orbax and PyTorch DCP (15 minutes)
	$(BIN)/python -m benchmarks.unchanged --json build/bench-unchanged.json --page docs/benchmarks

.PHONY: bench-fast-tier bench-fast-tier-goodput fast-tier
bench-fast-tier: $(STAMP)  ## measure copies and parity of the fast tier, and restores from it (15 minutes)
	$(BIN)/python -m benchmarks.fast_tier --json build/bench-fast-tier.json --page docs/benchmarks

bench-fast-tier-goodput: $(STAMP)  ## kill and erase hosts of a job with a fast tier, without one, and with Orbax (45 minutes; needs gcc)
	$(BIN)/python -m benchmarks.fast_tier_goodput --json build/bench-fast-tier-goodput.json --page docs/benchmarks

fast-tier: $(STAMP)  ## kill and erase hosts of jobs with a fast tier, flip bytes, send hostile frames, 30 minutes of faults (2 hours; needs root)
	$(BIN)/python -m tests.nightly.tiers.lost_hosts --trials 100
	$(BIN)/python -m tests.nightly.tiers.lost_hosts --trials 100 --redundancy xor
	$(BIN)/python -m tests.nightly.tiers.lost_hosts --trials 100 --redundancy p+q --killed 2
	$(BIN)/python -m tests.nightly.tiers.lost_hosts --trials 100 --hosts 8
	$(BIN)/python -m tests.nightly.tiers.flips
	$(BIN)/python -m tests.nightly.tiers.frames
	$(BIN)/python -m tests.nightly.tiers.soak
	$(BIN)/python -m pytest -q -m nightly tests/nightly/tiers/test_memory.py

bench-quick: $(STAMP)  ## run a smaller benchmark in a few minutes
	$(BIN)/python -m benchmarks.run --quick --json build/bench-quick.json --plots build/bench-quick

# PyTorch has its own environment, because it takes several GB; the subjects that need it run in their own processes.
bench-torch: $(TORCH_STAMP)  ## create the environment for the PyTorch libraries (6 GB); without it they are left out

$(TORCH_STAMP): benchmarks/torch-requirements.txt | python-is-new-enough
	$(PYTHON) -m venv --clear .venv-torch
	.ci/install .venv-torch -r $<
	touch $@

# The tests that need PyTorch, in its environment with this package added.
torch-imports: $(TORCH_IMPORTS_STAMP)  ## load checkpoints that PyTorch itself has written, in one process and two (8 GB)
	.venv-torch/bin/python -m pytest tests/unit/formats/test_torch_metadata.py tests/integration/formats/test_torch_loads.py tests/integration/formats/test_torch_jobs.py

$(TORCH_IMPORTS_STAMP): $(TORCH_STAMP) pyproject.toml constraints.txt
	.ci/install .venv-torch -c constraints.txt -e '.[all,test]'
	touch $@

# Each version has its own environment in build/, which is kept: some 5 GB. ARGS="--only 0.2.7,0.12.8" selects some.
.PHONY: orbax-versions
orbax-versions: $(STAMP)  ## exchange checkpoints with twelve versions of the real Orbax (30 minutes; later runs take minutes)
	$(BIN)/python -m tests.nightly.formats.orbax_versions $(ARGS)

# ARGS=path/to/checkpoint_manager_test.py, because an installed Orbax has no tests by default.
.PHONY: orbax-manager-tests
orbax-manager-tests: $(STAMP)  ## run Orbax's own tests of its manager against ours (minutes)
	$(BIN)/python -m tests.nightly.integrations.orbax_manager_suite $(ARGS)

scale: $(STAMP)  ## plan and simulate jobs of up to 100,000 processes, and measure the key-value store (10 minutes)
	$(BIN)/python -m benchmarks.scale

docs: $(STAMP)  ## build the site of the documentation in build/site; a broken link fails it
	$(BIN)/python -m mkdocs build --strict

docs-plots: $(STAMP)  ## draw the plots of docs/reference/policies.md from the policies
	$(BIN)/python -m benchmarks.policy_plots

clean:  ## remove everything that was made
	rm -rf $(VENV) .venv-torch build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find jaxckpt_train tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
