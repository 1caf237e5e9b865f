# Everything a contributor runs. Needs python3 and make; the rest comes with `make setup`.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ithaca-setup

# Build environments obey the same pins as the package, so none of them pulls a second torch.
# pip before 25.3 reads the first name there, later ones the second.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: setup test docs faults fuzz plans losses trees families lint format demo evidence dist clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

# Two processes, a file of tests each: with one, half of two cores waits. Each has its own pool of ranks. The longest files go first
# (tests/conftest.py), not those with most tests. Bytecode is kept, or every rank compiles the package.
test: lint
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=10

# The site into site/, warnings as errors (-q would not count them); then the commands of README, tutorial and guides are typed.
# 3 minutes on 2 cores.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	ITHACA_DOCS=long $(BIN)/python -m pytest -q -s tests/test_docs.py

# The long version of tests/faults: 4 ranks, every point, 50 random kills. About 6 minutes on 2 cores that are otherwise idle.
faults: setup
	ITHACA_FAULTS=long $(BIN)/python -m pytest -q -s --timeout=3600 tests/faults tests/storage/test_faults.py \
		tests/storage/test_resume.py tests/storage/test_run_faults.py tests/base/test_workers.py tests/training/launch \
		tests/training/test_not_finite.py tests/training/test_switches.py

# The long version of tests/fuzz: 5,000 seeded cases over every verb, setting and received file, 100 of them as real commands.
# 8 minutes on 2 cores; ITHACA_FUZZ_SEED=7 makes others.
fuzz: setup
	ITHACA_FUZZ=long $(BIN)/python -m pytest -q -s tests/fuzz

# More configurations of the plan's arithmetic against the code: some 8 minutes on 2 cores.
plans: setup
	ITHACA_PLANS=long $(BIN)/python -m pytest -q -n 2 tests/planner tests/observe/profiler tests/test_benchmarks.py tests/test_recipes.py

# Log-probabilities under any gradient: every family and three of their own code on 1 to 8 ranks; more layouts of a base in NF4, of
# steps and of runs. Over 3 minutes on 2 cores.
losses: setup
	ITHACA_LOSSES=long $(BIN)/python -m pytest -q tests/contract/test_log_probs.py tests/contract/test_one_loss.py \
		tests/contract/test_training.py tests/integrations tests/parity/test_nf4.py tests/training/test_step.py \
		tests/training/test_optim.py tests/training/test_train.py

# More trees, models and layouts against the unrolled batch; steps with and without shared prompts. 9 minutes on 2 cores.
trees: setup
	ITHACA_TREES=long $(BIN)/python -m pytest -q tests/parity/test_trees.py tests/training/test_criterion.py

# Every decoder type of transformers, tried: docs/reference/families.md. Then linear mixers on real ranks, with every way to keep
# activations, every pair of settings with every family of the table, and every head schedule. Over 20 minutes on 2 cores.
families: setup
	$(BIN)/python -m ithaca.verify.families > docs/reference/families.md.new
	mv docs/reference/families.md.new docs/reference/families.md
	ITHACA_FAMILIES=long $(BIN)/python -m pytest -q tests/parity/test_mixers.py tests/parity/test_matrix.py \
		tests/parity/test_families.py tests/parity/test_any_decoder.py tests/contract tests/ranks/test_formula.py \
		tests/evaluation/test_score.py tests/evaluation/test_training.py tests/evaluation/generate tests/engine \
		tests/verify/test_families.py

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Two minutes on 2 cores, after setup.
demo: setup
	$(BIN)/python examples/demo.py

# A tiny model fails at four times its length, is extended, and finds needles there: docs/developer/evidence.
evidence: setup
	$(BIN)/python examples/extension.py

# The wheel and the sdist of a release in dist/, checked, then installed into an environment of its own outside this folder and
# tried there. About 90 s on 2 cores where pip has torch at hand.
dist: setup
	$(BIN)/python scripts/dist.py

clean:
	rm -rf .venv build dist site .pytest_cache .ruff_cache src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
