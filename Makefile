# The template's own targets; those of a generated project are in its Makefile.

# What an environment is made with; one that exists keeps its Python.
PYTHON ?= python3
# With BOUNDS=lowest the lowest versions that a project's pyproject.toml allows, in an environment of their own.
BOUNDS ?=
VENV = .venv$(if $(filter lowest,$(BOUNDS)),/lowest)
ifeq ($(BOUNDS),lowest)
export PIP_CONSTRAINT = $(CURDIR)/tests/lowest.txt
export UV_CONSTRAINT = $(PIP_CONSTRAINT)
TORCH ?= torch
endif
# The one place that names the PyTorch of the tests and the demo.
TORCH ?= torch==2.13.0
TEMPLATE = {{cookiecutter.project_slug}}
TASKS = $(patsubst templates/%/task.py,%,$(wildcard templates/*/task.py))
# What the demo needs, and what the tests need on top of it: the first run waits for no more.
DEMO = $(VENV)/.demo
TESTS = $(VENV)/.tests
# The programs that `make bench` compares have an environment of their own.
BENCH = .venv/bench/.installed
# So have the tests and tools of others; what they stand on is pinned.
WITNESS = .venv/witness
EXTRAS = dev,trackio,tensorboard
# DeepSpeed lies apart, with what it needs besides the rest: where it is installed, accelerate
# imports it in each run. Nothing is compiled.
ZERO = $(VENV)/deepspeed
ZERO_PACKAGES = 'deepspeed>=0.19' einops hjson msgpack ninja py-cpuinfo
# So do Jupyter and ckpt-chaos, which one test each needs. In $(VENV) the second would put the
# wheel of the library before its sources.
ADDED = $(VENV)/extra
# Processes that share the tests: two, on four cores or more three.
WORKERS ?= $(shell if [ "$$(getconf _NPROCESSORS_ONLN)" -ge 4 ]; then echo 3; else echo 2; fi)
# Benchmarks take the library from its sources, as the tests do; the demo has a wheel.
SOURCES = PYTHONPATH='$(CURDIR)/src'
PYTEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal
# The default answers, whatever ~/.cookiecutterrc says.
BAKE = $(VENV)/bin/cookiecutter . --no-input --default-config

# A Python that was asked for is the one that runs the tests, or a line says why not.
define fit_python
@asked=$$($(PYTHON) -V) && has=$$($(VENV)/bin/python -V) && test "$$asked" = "$$has" || { \
	echo "$(VENV) has $$has, not $$asked: leave out PYTHON, or remove $(VENV)" >&2; exit 2; }
endef
python_fits = $(if $(filter-out file,$(origin PYTHON)),$(fit_python))

.PHONY: help demo docs test test-all test-zero torture faults bench bench-short bench-steps bench-scaling \
	bench-scale bench-small figure receipt audit gpu witness

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(DEMO)  ## bake a project into demo/ and train it, or continue it (rm -r demo starts over)
	@test -d demo/my_training || $(BAKE) --output-dir demo >/dev/null
	@$(VENV)/bin/python -m pip install --quiet --no-deps demo/my_training/vendor/*.whl
	@$(MAKE) --no-print-directory -C demo/my_training train VENV=../../$(VENV)
	@echo
	@echo '(eval_loss is the validation loss; unigram_loss, what token frequencies alone would give.)'
	@echo 'The picture: demo/my_training/runs/default/curves.png'
	@echo 'That was demo/my_training. Next:'
	@echo '  $(VENV)/bin/cookiecutter .                         # a project of your own'
	@echo '  make -C demo/my_training plot VENV=../../$(VENV)   # draw curves.png again'
	@echo '  $$EDITOR demo/my_training/task.py                 # what is trained: data, model, loss'

# A test that is asked for by its name is run, slow or not.
test: $(TESTS)  ## check the style, run the quick tests (WORKERS=3; one: ARGS="-k hostile")
	$(python_fits)
	$(VENV)/bin/ruff check --config pyproject.toml .
	$(VENV)/bin/ruff format --check --config pyproject.toml .
	$(PYTEST) $(if $(findstring -k,$(ARGS))$(findstring ::,$(ARGS)),,-m "not slow") $(ARGS)

test-all: $(TESTS) $(ADDED)/.installed  ## check the types, run the slow tests, which `make test` leaves out
	$(python_fits)
	$(if $(ARGS),,$(VENV)/bin/mypy)
	$(PYTEST) -m slow $(ARGS)
	$(if $(ARGS),,$(MAKE) --no-print-directory test-zero)

test-zero: $(TESTS) $(ZERO)/.installed  ## run the tests of DeepSpeed, as test-all does
	PYTHONPATH=$(ZERO) $(PYTEST) tests/test_deepspeed.py $(ARGS)

torture: $(TESTS)  ## kill, damage and stop runs, and print what survived (KILLS=100 SEED=1 MIRROR=1)
	@cd tests && $(SOURCES) OMP_NUM_THREADS=1 KILLS='$(or $(KILLS),100)' ../$(VENV)/bin/python torture.py

faults: $(TESTS)  ## apply each of tests/faults/ to a copy, and print which quick tests catch it (ARGS=NAME)
	@$(VENV)/bin/python tests/faults/run.py $(ARGS)

bench: $(BENCH)  ## compare with a plain loop, Accelerate, HF Trainer and Lightning: 12 minutes
	@$(SOURCES) .venv/bench/bin/python benchmarks/compare.py $(ARGS)

bench-short: $(BENCH)  ## the same for the small step, three programs and few rounds: 2 minutes
	@$(SOURCES) .venv/bench/bin/python benchmarks/compare.py --sizes small --rounds 20 \
		--peers 'plain loop' 'HF Trainer' 'baked project' --output .venv/bench/short $(ARGS)

bench-steps: $(BENCH)  ## measure what exact costs: 5 minutes
	@$(SOURCES) .venv/bench/bin/python benchmarks/compare.py --peers 'baked project' exact \
		--micro_batch 2 --processes 1 2 4 --rounds 8 --name steps $(ARGS)

bench-scaling: $(TESTS)  ## measure the speed-up over 1, 2 and 4 devices: 10 minutes
	@$(SOURCES) $(VENV)/bin/python benchmarks/scaling.py $(ARGS)

bench-scale: $(BENCH)  ## measure how 100 MB of text are prepared and read: 15 minutes
	@$(SOURCES) .venv/bench/bin/python benchmarks/scale.py $(ARGS)

bench-small: $(TESTS)  ## measure what the recipes of pretrained weights learn from few rows: 40 minutes
	@$(SOURCES) $(VENV)/bin/python benchmarks/small_data.py $(ARGS)

receipt: $(TESTS)  ## write docs/receipt.json, of the first run of the figure of README.md: a minute
	@$(SOURCES) $(VENV)/bin/python benchmarks/figure.py --receipt

audit: $(TESTS)  ## train 20 steps of docs/receipt.json again, and compare the states: a minute
	@$(SOURCES) $(VENV)/bin/python benchmarks/figure.py --audit

figure: $(TESTS)  ## draw the figure of README.md from runs on 1, 2 and 4 processes and five kills: minutes
	@$(SOURCES) $(VENV)/bin/python benchmarks/figure.py

docs: $(TESTS)  ## build the site into .cache/site, with warnings as errors: a minute (the first time ten)
	@test -d .venv/docs || $(call add,.venv/docs,-r docs/requirements.txt)
	@$(SOURCES) $(VENV)/bin/python docs/render.py
	@PYTHONPATH='$(CURDIR)/.venv/docs' $(VENV)/bin/python -m sphinx -q -W --keep-going docs .cache/site
	@echo .cache/site/index.html

gpu: $(TESTS)  ## check what only a GPU can show, in an hour at most (in ten minutes: ARGS="--minutes 10")
	@$(SOURCES) $(VENV)/bin/python benchmarks/gpu.py $(ARGS)

# CS336 and ACCELERATE reach the program as variables of its environment.
witness: $(WITNESS)/.installed  ## run tests of others on samestep: 18 minutes (one: ARGS=chaos; CS336=CLONE ACCELERATE=CLONE)
	@$(SOURCES) $(WITNESS)/bin/python witness/run.py $(ARGS)

# The dependencies of generated projects come from baked ones, through their own `make setup`.
# $(call setup,TASK,EXTRAS)
setup = $(BAKE) --output-dir $(VENV)/baked --overwrite-if-exists task=$(1) >/dev/null && \
	$(MAKE) --no-print-directory -C $(VENV)/baked/my_training setup VENV='$(CURDIR)/$(VENV)' \
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
add = python=$(VENV)/bin/python; install=$$(command -v uv >/dev/null && \
	echo "uv pip install --python $$python" || echo "$$python -m pip install") && \
	$$install --quiet --target $(1) $(2)

$(ZERO)/.installed: $(TESTS)
	@export DS_BUILD_OPS=0; $(call add,$(ZERO),--no-deps $(ZERO_PACKAGES))
	@touch $@

$(ADDED)/.installed: $(TESTS)
	@$(call add,$(ADDED),'nbclient>=0.10' 'ipykernel>=6.29' 'ckpt-chaos==0.1.8')
	@touch $@

$(WITNESS)/.installed: VENV = $(WITNESS)
$(WITNESS)/.installed: witness/requirements.txt
	@$(install) -r witness/requirements.txt
	@touch $@

$(BENCH): VENV = .venv/bench
$(BENCH): benchmarks/requirements.txt $(TEMPLATE)/pyproject.toml
	@$(install) -r benchmarks/requirements.txt
	@$(call setup,causal_lm,)
	@touch $@
