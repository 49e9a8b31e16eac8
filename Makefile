# Needs Python 3.10 or newer, with its venv module, and make. The first target builds .venv (a few minutes).
PYTHON ?= python3
BIN    := .venv/bin

help:
	@echo 'make pretrain     train on the world and print the transfer table (ARGS="--recipe world_words", or others of vlrep pretrain)'
	@echo 'make test         every check there is; the last line is "N passed, M failed"'
	@echo 'make rehearse     every row of the five papers, small, on imitations of their data: a quarter of an hour (PAPER=virtex)'
	@echo 'make robust       the checks on learning with other seeds, precisions, threads and instruction sets: hours (ONLY=... SEEDS=... ISA=...)'
	@echo 'make lab          JupyterLab on the notebooks'
	@echo 'make check        the checks of some notebooks, without slow cells (ONLY="NAME ...")'
	@echo 'make notebooks    run all notebooks anew, slow cells too, and rewrite their outputs (ONLY="NAME ...")'
	@echo 'make format       lay out notebooks, tests and scripts (ruff)'
	@echo 'make export       write vlrep/, the contents and the links from the notebooks as they are, and clean them'
	@echo 'make readme       write README.md from nbs/index.ipynb'
	@echo 'make curves       train the runs anew that others are compared with (METHOD="NAME ..." RECIPE=tiny SEEDS=5 RUNS=FOLDER)'
	@echo 'make docs         the documentation site in _docs/html, built and checked without executing anything'
	@echo 'make clean        remove the environments and what was built; runs/ stays'
	@echo 'PYTHON=python3.12 chooses the Python that .venv is built with'

venv:
	@$(PYTHON) .ci/environment.py

pretrain: venv
	@$(BIN)/vlrep pretrain $(or $(ARGS),--recipe world_words)

test:
	@$(PYTHON) .ci/test.py

rehearse: venv
	@for paper in $(or $(PAPER),virtex pretraining_right loctex mct icmlm); do \
		$(BIN)/vlrep reproduce run $$paper --rehearse --workers 0 || exit 1; done

robust: venv
	@ONLY="$(ONLY)" SEEDS="$(SEEDS)" ISA="$(ISA)" RESULTS="$(RESULTS)" $(BIN)/python .ci/robust.py

lab: venv
	@$(BIN)/jupyter lab --notebook-dir nbs $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

check: venv
	@$(BIN)/python -W ignore .ci/notebooks.py test $(ONLY)

notebooks: venv
	@$(BIN)/python .ci/notebooks.py run $(ONLY)
	@$(MAKE) --no-print-directory export readme

format: venv
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format --quiet .

export: venv
	@$(BIN)/python .ci/contents.py
	@$(BIN)/nbdev_clean
	@$(BIN)/nbdev_export

readme: venv
	@$(BIN)/python .ci/readme.py

curves: venv
	@$(BIN)/python .ci/curves.py $(METHOD) $(if $(RECIPE),--recipe $(RECIPE)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(RUNS),--runs $(RUNS))

docs:
	@$(PYTHON) .ci/docs.py

clean:
	rm -rf .venv .venv-newest .venv-docs build dist _docs _proc *.egg-info .pytest_cache
	find vlrep nbs tests .ci \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

.PHONY: help venv pretrain test rehearse robust lab check notebooks format export readme curves docs clean
.NOTPARALLEL:
