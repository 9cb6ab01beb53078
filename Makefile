# The template's own targets; those of a generated project are in its Makefile.

PYTHON ?= python3
VENV = .venv
# The one place that names the PyTorch of the tests and the demo.
TORCH ?= torch==2.13.0
TEMPLATE = {{cookiecutter.project_slug}}
TASKS = $(basename $(notdir $(wildcard templates/tasks/*.py)))
# What the demo needs, and what the tests need on top of it: the first run waits for no more.
DEMO = .venv/.demo
TESTS = .venv/.tests
# The programs that `make bench` compares have an environment of their own.
BENCH = .venv/bench/.installed
EXTRAS = dev,trackio,tensorboard
# DeepSpeed lies apart, with what it needs besides the rest: where it is installed, accelerate
# imports it in each run. Nothing is compiled.
ZERO = .venv/deepspeed
ZERO_PACKAGES = 'deepspeed>=0.19' einops hjson msgpack ninja py-cpuinfo
# So do Jupyter, Optuna and lm-evaluation-harness, which one test each needs.
ADDED = .venv/extra
# Processes that share the tests: two, on four cores or more three.
WORKERS ?= $(shell if [ "$$(getconf _NPROCESSORS_ONLN)" -ge 4 ]; then echo 3; else echo 2; fi)
# Benchmarks take the library from its sources, as the tests do; the demo has a wheel.
SOURCES = PYTHONPATH='$(CURDIR)/src'
PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n $(WORKERS) --dist worksteal
# The default answers, whatever ~/.cookiecutterrc says.
BAKE = $(VENV)/bin/cookiecutter . --no-input --default-config

.PHONY: help demo schema test test-all test-zero torture bench bench-steps bench-scaling bench-ddp \
	bench-precision bench-scale gpu

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(DEMO)  ## bake a project into demo/ and train it, or continue it (rm -r demo starts over)
	@test -d demo/my_training || $(BAKE) --output-dir demo >/dev/null
	@.venv/bin/python -m pip install --quiet --no-deps demo/my_training/vendor/*.whl
	@$(MAKE) --no-print-directory -C demo/my_training train VENV=../../.venv
	@echo
	@echo '(eval_loss is the validation loss; unigram_loss, what token frequencies alone would give.)'
	@echo 'The picture: demo/my_training/runs/default/curves.png'
	@echo 'That was demo/my_training. Next:'
	@echo '  .venv/bin/cookiecutter .                         # a project of your own'
	@echo '  make -C demo/my_training plot VENV=../../.venv   # draw curves.png again'
	@echo '  $$EDITOR demo/my_training/task.py                 # what is trained: data, model, loss'

# A test that is asked for by its name is run, slow or not.
test: $(TESTS)  ## check the style, run the quick tests (WORKERS=3; one: ARGS="-k hostile")
	.venv/bin/ruff check --config pyproject.toml .
	.venv/bin/ruff format --check --config pyproject.toml .
	$(PYTEST) $(if $(findstring -k,$(ARGS))$(findstring ::,$(ARGS)),,-m "not slow") $(ARGS)

test-all: $(TESTS) $(ADDED)/.installed  ## check the types, run the slow tests, which `make test` leaves out
	$(if $(ARGS),,.venv/bin/mypy)
	$(PYTEST) -m slow $(ARGS)
	$(if $(ARGS),,$(MAKE) --no-print-directory test-zero)

test-zero: $(TESTS) $(ZERO)/.installed  ## run the tests of DeepSpeed, as test-all does
	PYTHONPATH=$(ZERO) $(PYTEST) tests/test_deepspeed.py $(ARGS)

schema: $(TESTS)  ## write templates/schemas/ anew, after an edit of the fields of train.py or a task
	@UPDATE_SCHEMAS=1 $(PYTEST) -n 0 -q tests/test_schema.py -k committed

torture: $(TESTS)  ## kill, damage and stop runs, and print what survived (KILLS=100 SEED=1)
	@cd tests && $(SOURCES) OMP_NUM_THREADS=1 KILLS='$(or $(KILLS),100)' ../.venv/bin/python torture.py

bench: $(BENCH)  ## compare with a plain loop, Accelerate, HF Trainer and Lightning: 12 minutes
	@$(SOURCES) .venv/bench/bin/python benchmarks/compare.py $(ARGS)

bench-steps: $(BENCH)  ## measure what exact costs, and what device_shares gain: 10 minutes
	@$(SOURCES) .venv/bench/bin/python benchmarks/steps.py $(ARGS)

bench-scaling: $(TESTS)  ## draw the speed-up over 1, 2 and 4 devices: 10 minutes
	@$(SOURCES) .venv/bin/python benchmarks/scaling.py $(ARGS)

bench-ddp: $(TESTS)  ## measure what the settings of DDP cost or gain: 5 minutes
	@$(SOURCES) .venv/bin/python benchmarks/ddp.py $(ARGS)

bench-precision: $(TESTS)  ## train each task in fp32 and in bf16, and compare: 10 minutes
	@$(SOURCES) .venv/bin/python benchmarks/precision.py $(ARGS)

bench-scale: $(BENCH)  ## measure how text is prepared and read, from 10 to 200 MB: 10 minutes
	@$(SOURCES) .venv/bench/bin/python benchmarks/scale.py $(ARGS)

gpu: $(TESTS)  ## check what only a GPU can show, against stored figures: an hour at most
	@$(SOURCES) .venv/bin/python benchmarks/checklist.py $(ARGS)

# The dependencies of generated projects come from baked ones, through their own `make setup`.
# $(call setup,TASK,EXTRAS)
setup = $(BAKE) --output-dir .venv/baked --overwrite-if-exists task=$(1) >/dev/null && \
	$(MAKE) --no-print-directory -C .venv/baked/my_training setup VENV='$(CURDIR)/$(VENV)' \
		EXTRAS=$(2) TORCH='$(TORCH)'
install = VENV=$(VENV) PYTHON='$(PYTHON)' TORCH='$(TORCH)' sh '$(TEMPLATE)/install.sh'

$(DEMO): $(TEMPLATE)/pyproject.toml $(TEMPLATE)/install.sh
	@$(install) '$(shell grep ^cookiecutter tests/requirements.txt)'
	@$(call setup,causal_lm,)
	@touch $@

$(TESTS): $(DEMO) tests/requirements.txt
	@$(install) -r tests/requirements.txt
	@for task in $(TASKS); do $(call setup,$$task,$(EXTRAS)) || exit; done
	@touch $@

# $(call add,FOLDER,PACKAGES): into a folder of its own.
add = python=.venv/bin/python; install=$$(command -v uv >/dev/null && \
	echo "uv pip install --python $$python" || echo "$$python -m pip install") && \
	$$install --quiet --target $(1) $(2)

$(ZERO)/.installed: $(TESTS)
	@export DS_BUILD_OPS=0; $(call add,$(ZERO),--no-deps $(ZERO_PACKAGES))
	@touch $@

$(ADDED)/.installed: $(TESTS)
	@$(call add,$(ADDED),'nbclient>=0.10' 'ipykernel>=6.29')
	@$(call add,$(ADDED),--no-deps 'optuna>=4.0' colorlog 'lm_eval>=0.4.13')
	@touch $@

$(BENCH): VENV = .venv/bench
$(BENCH): benchmarks/requirements.txt $(TEMPLATE)/pyproject.toml
	@$(install) -r benchmarks/requirements.txt
	@$(call setup,causal_lm,)
	@touch $@
