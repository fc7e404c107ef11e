# Everything here makes what it needs by itself: a virtual environment per purpose, made again when pyproject.toml or
# constraints.txt change. PYTHON=python3.12 chooses the interpreter, JOBS the number of test processes.
PYTHON ?= python3
JOBS ?= 2
PIP = bin/python -m pip --disable-pip-version-check install -qq -c $(CONSTRAINTS)
SIZE ?= 1.2GB
BENCH ?=
GENUINE ?=
MEGATRON ?=
IMPORTS ?=
CATALOGUE ?=
PYTEST ?=
MARKS ?= thorough or ranks or libraries or servers or filesystems or hypothesis

# a file's tests stay in one process, which makes what they share once
PARALLEL = -n $(JOBS) --dist loadfile
# compiled once, not by each of the hundreds of processes that the tests start
export PYTHONDONTWRITEBYTECODE =

SOURCES := $(shell find migrate rules schemas -type f -not -name '*.pyc')

OLDEST ?= python3.10
CONSTRAINTS ?= constraints.txt

.PHONY: help check test test-oldest marks gpu wheels genuine genuine-megatron imports catalogue demo campaign bench peers docs lint constraints clean
.DELETE_ON_ERROR:

help:
	@echo "make test      run the tests: 17 minutes on two slow cores (PYTEST='-k name' is passed on)"
	@echo "make check     ruff, mypy, and the tests that need neither torch nor another process: three minutes on two slow cores"
	@echo "make marks     run the tests that make test leaves out (MARKS='ranks or libraries')"
	@echo "make test-oldest  make test with the oldest Python and the oldest libraries that pyproject.toml admits"
	@echo "make gpu       the tests and rows that need a GPU, by PYTHON as it is; without a GPU it lists them"
	@echo "make wheels    fill wheels/ with what make gpu may lack where there is no network"
	@echo "make genuine   make tests/data/genuine again, by the libraries themselves (GENUINE='ct-nvfp4 modelopt-fp8')"
	@echo "make genuine-megatron  make tests/data/megatron again, by megatron-core, and have it load what is written (MEGATRON='llama qwen3')"
	@echo "make imports   prove the rules imported from every entry of transformers' mapping, and write docs/reference/transformers.md"
	@echo "make catalogue  make the lineages of transformers' model types again, and show what changed"
	@echo "make demo      a checkpoint there and back again"
	@echo "make lint      ruff and mypy"
	@echo "make campaign  hundreds of random cases, kills and injected failures"
	@echo "make bench     the speed and memory table        (SIZE=1.2GB|2GB|4.4GB, BENCH='--rounds 5 --rows pack')"
	@echo "make peers     .venv-peers, whose libraries make bench compares number formats with: some GB"
	@echo "make docs      the site of docs/, in site/"
	@echo "make constraints  constraints.txt again, with the newest release of all that is not pinned by hand"
	@echo "make clean     remove environments and everything made"

define environment
	@echo "making $(@D)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.12")'
	@rm -rf $(@D)
	@$(PYTHON) -m venv $(@D)
endef

# what .venv-test holds, which is not installed once more
define over-test
	@cd $(@D)/lib/python3*/site-packages && echo "import site; site.addsitedir('$$(ls -d $(CURDIR)/.venv-test/lib/python3*/site-packages)')" > over-test.pth
endef

.venv-test/.ready: pyproject.toml constraints.txt
	$(environment)
	@$(@D)/$(PIP) -e '.[test]'
	@touch $@

.venv-test/.lint: .venv-test/.ready
	@$(@D)/$(PIP) -e '.[test,dev]'
	@touch $@

.venv-test/.docs: .venv-test/.ready
	@$(@D)/$(PIP) -e '.[test,docs]'
	@touch $@

.venv-demo/.ready: pyproject.toml constraints.txt
	$(environment)
	@$(@D)/$(PIP) .
	@touch $@

# the demo runs what a user would install, so a changed source is installed again
.venv-demo/.installed: .venv-demo/.ready $(SOURCES)
	@$(@D)/$(PIP) --no-deps .
	@touch $@

test: .venv-test/.ready
	.venv-test/bin/python -m pytest -q $(PARALLEL) $(PYTEST)

# what is quick enough to run while working
check: lint
	.venv-test/bin/python -m pytest -q $(PARALLEL) --light $(PYTEST)

# what constraints-oldest.txt holds, in an environment of its own; torch 2.8 takes several GB unless pip finds a CPU build
.venv-oldest/.ready: PYTHON = $(OLDEST)
.venv-oldest/.ready: pyproject.toml constraints-oldest.txt
	$(environment)
	@$(@D)/bin/python -m pip --disable-pip-version-check install -qq -c constraints-oldest.txt -e '.[test]'
	@touch $@

# a new release of a library is a change to commit, with what it asks for; what is pinned by hand stands above the blank line, and the rest
# holds for Python 3.11 and newer
.venv-newest/.ready:
	$(environment)
	@sed '/^$$/q' constraints.txt > $(@D)/by-hand.txt
	@$(@D)/bin/python -m pip --disable-pip-version-check install -qq -c $(@D)/by-hand.txt -e '.[test,dev,docs]'
	@touch $@

constraints:
	@rm -rf .venv-newest
	@$(MAKE) --no-print-directory .venv-newest/.ready
	@cd .venv-newest && { cat by-hand.txt; bin/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' \
	  | grep -vixFf by-hand.txt | sed 's/$$/; python_version >= "3.11"/'; } > constraints.txt
	@mv .venv-newest/constraints.txt constraints.txt

# a release that reads what is written here, and has no migrate; for the mark libraries
.venv-torch26/.ready:
	$(environment)
	@$(@D)/bin/python -m pip --disable-pip-version-check install -qq torch==2.6.0 numpy
	@touch $@

# a server of S3 for the mark servers; it pins another botocore than the tests have
.venv-ministack/.ready:
	$(environment)
	@$(@D)/bin/python -m pip --disable-pip-version-check install -qq ministack==1.5.33
	@touch $@

# what tests/source/test_stores_emulators.py reads Google's and Azure's stores with, over what .venv-test has, and an emulator of the first
.venv-stores/.ready: .venv-test/.ready
	$(environment)
	$(over-test)
	@$(@D)/$(PIP) gcsfs==2026.10.1 adlfs==2026.8.0 gcp-storage-emulator==2026.7.19
	@touch $@

# the libraries that make tests/data/genuine, and that make bench compares number formats with; ModelOpt's own requirements exclude transformers as it is
.venv-peers/.ready: pyproject.toml constraints.txt
	$(environment)
	@$(@D)/$(PIP) -e '.[test]' compressed-tensors==0.20.0 torchao==0.18.0 gguf==0.19.0 omegaconf ninja nvidia-ml-py 'pulp<4' regex scipy
	@$(@D)/$(PIP) --no-deps nvidia-modelopt==0.47.0 bitsandbytes==0.50.2
	@touch $@

peers: .venv-peers/.ready

# every entry of transformers' conversion mapping: what the library loads, and what imported rules make of the same file
imports: .venv-peers/.ready
	.venv-peers/bin/python tests/authoring/make_imports.py $(IMPORTS)

# the lineages that ship for its model types; CATALOGUE=--check writes nothing
catalogue: .venv-test/.ready
	.venv-test/bin/python tests/authoring/make_catalogue.py $(CATALOGUE)

genuine: .venv-peers/.ready
	.venv-peers/bin/python tests/genuine/make_genuine.py $(GENUINE)
	.venv-peers/bin/python tests/genuine/weights.py

# Megatron's library, over what .venv-test has: it needs neither a GPU nor anything of .venv-peers to write what the tests read, and to load what is written here
.venv-megatron/.ready: .venv-test/.ready
	$(environment)
	$(over-test)
	@$(@D)/$(PIP) megatron-core==0.16.1 psutil
	@touch $@

# what tests/genuine/test_other_projects.py compares with, over what .venv-test has; the last torchtune needs a torchao of its time
.venv-projects/.ready: .venv-test/.ready
	$(environment)
	$(over-test)
	@sed '/^torchao=/d' $(CONSTRAINTS) > $(@D)/constraints.txt
	@$(@D)/bin/python -m pip --disable-pip-version-check install -qq -c $(@D)/constraints.txt \
	  timm==1.0.31 open_clip_torch==3.3.0 torchtune==0.6.1 torchao==0.9.0 torchvision
	@touch $@

genuine-megatron: .venv-megatron/.ready
	.venv-megatron/bin/python tests/genuine/make_megatron.py $(MEGATRON)
	.venv-megatron/bin/python tests/genuine/check_megatron.py $(MEGATRON)

test-oldest: .venv-oldest/.ready
	.venv-oldest/bin/python -m pytest -q $(PARALLEL) $(PYTEST)

# and every property of Hypothesis again, with many examples
marks: .venv-test/.ready
	.venv-test/bin/python -m pytest -q $(PARALLEL) -m "$(MARKS)" --hypothesis-profile many $(PYTEST)

# PYTHON as it is, with its own CUDA torch: no environment is made and nothing is downloaded
gpu:
	$(PYTHON) benchmarks/gpu.py

# for the interpreter of another machine: all of it that is pure Python, and of that version what is not
WHEELS_PYTHON ?= 3.12
PLATFORMS = manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64
FOR_TESTS = pydantic PyYAML jsonschema click rich xxhash isal safetensors einops pytest pytest-timeout hypothesis
wheels:
	$(PYTHON) -m pip --disable-pip-version-check download -q -d wheels --only-binary=:all: --implementation cp \
	  --python-version $(WHEELS_PYTHON) $(addprefix --platform ,$(PLATFORMS)) $(FOR_TESTS)
	@ls wheels

campaign: .venv-test/.ready
	.venv-test/bin/python -m pytest -q -m "campaign or hypothesis" --hypothesis-profile campaign --timeout 7200 $(PYTEST)

demo: .venv-demo/.installed
	@PATH="$(CURDIR)/.venv-demo/bin:$$PATH" bash benchmarks/demo.sh

bench: .venv-test/.ready
	.venv-test/bin/python benchmarks/bench.py --size $(SIZE) $(BENCH)

docs: .venv-test/.docs
	.venv-test/bin/python -m mkdocs build --strict --quiet

lint: .venv-test/.lint
	.venv-test/bin/ruff check
	.venv-test/bin/ruff format --check
	.venv-test/bin/mypy

clean:
	rm -rf .venv-test .venv-oldest .venv-newest .venv-ministack .venv-stores .venv-peers .venv-megatron .venv-projects .venv-demo .venv-lint demo wheels bench-data build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
