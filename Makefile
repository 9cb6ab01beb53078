# The template's own targets; those of a generated project are in its Makefile.

PYTHON ?= python3
# The one place that names the PyTorch of the tests and the demo.
TORCH ?= torch==2.13.0
TEMPLATE = {{cookiecutter.project_slug}}
TASKS = $(basename $(notdir $(wildcard templates/tasks/*.py)))
STAMP = .venv/.installed
# The default answers, whatever ~/.cookiecutterrc says.
BAKE = .venv/bin/cookiecutter . --no-input --default-config

.PHONY: help demo test torture

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP)  ## bake a project into demo/ and train it; what is there is kept: rm -r demo starts over
	@test -d demo/my_training || $(BAKE) --output-dir demo >/dev/null
	@$(MAKE) --no-print-directory -C demo/my_training train VENV=../../.venv
	@echo
	@echo '(eval_loss is the validation loss; unigram_loss, what token frequencies alone would give.)'
	@echo 'The picture: demo/my_training/runs/default/curves.png'
	@echo 'That was demo/my_training. Next:'
	@echo '  .venv/bin/cookiecutter .                         # a project of your own'
	@echo '  make -C demo/my_training plot VENV=../../.venv   # draw curves.png again'
	@echo '  $$EDITOR demo/my_training/task.py                 # what is trained: data, model, loss'

test: $(STAMP)  ## check the style and run all tests (one: make test ARGS="-k hostile")
	.venv/bin/ruff check --config pyproject.toml .
	.venv/bin/ruff format --check --config pyproject.toml .
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest $(ARGS)

torture: $(STAMP)  ## kill, damage and stop runs, and print what survived (KILLS=100 SEED=1)
	@cd tests && OMP_NUM_THREADS=1 KILLS='$(or $(KILLS),100)' ../.venv/bin/python torture.py

# The dependencies of generated projects come from baked ones, through their own `make setup`.
$(STAMP): tests/requirements.txt $(TEMPLATE)/pyproject.toml $(TEMPLATE)/install.sh
	@VENV=.venv PYTHON='$(PYTHON)' TORCH='$(TORCH)' sh '$(TEMPLATE)/install.sh' -r tests/requirements.txt
	@for task in $(TASKS); do \
		$(BAKE) --output-dir .venv/baked --overwrite-if-exists task=$$task >/dev/null && \
		$(MAKE) --no-print-directory -C .venv/baked/my_training setup VENV='$(CURDIR)/.venv' \
			EXTRAS=dev,trackio,tensorboard TORCH='$(TORCH)' || exit; \
	done
	@touch $@
