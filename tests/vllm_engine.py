"""Starts vLLM engines in child processes and talks to them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def environment(folder: Path) -> dict[str, str]:
    """What every vLLM process gets: small, on loopback, with the shims, without telemetry."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(HERE / "vllm_site"), os.environ.get("PYTHONPATH")])
        ),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(folder / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Otherwise the heap's layout decides whether glibc gives memory back after every forward;
        # that alone is a tenth of the CPU seconds, with or without us.
        "MALLOC_TRIM_THRESHOLD_": str(1 << 29),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 28),
    }


def transfer_config(store: str, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "TailReplayConnector",
        "kv_connector_module_path": "tailreplay.connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store, **extra},
    }


class Engine:
    """An engine in a child process; a method call is a command to it."""

    def __init__(self, model: Path, store: str | None, folder: Path, **arguments: Any) -> None:
        # A busy machine may starve a lookup; only tests of the deadline want the default.
        connector = {"match_timeout_s": 5.0} | arguments.pop("connector", {})
        settings = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "max_model_len": 4096,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 16,
            "max_logprobs": -1,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "seed": 0,
            **arguments,
        }
        if store is not None:
            settings["kv_transfer_config"] = transfer_config(store, **connector)
        self.log = folder / f"engine-{os.urandom(4).hex()}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(HERE / "vllm_child.py"), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment(folder),
                start_new_session=True,
            )
        self._answer()

    def __getattr__(self, name: str) -> Any:
        def call(**arguments: Any) -> Any:
            self.process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
            self.process.stdin.flush()
            return self._answer()

        return call

    def close(self) -> None:
        """Ends the engine and every process of its own."""
        with contextlib.suppress(OSError), self.process.stdin:
            self.process.stdin.write('{"call": "quit"}\n')
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def _answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the engine ended:\n{self.log.read_text()[-6000:]}")
        return json.loads(line)
