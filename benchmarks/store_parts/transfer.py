"""Fields about moving objects: against a copy, a raw socket and the peers, in the same rounds."""

import contextlib
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from store_parts.children import PEERS_PYTHON, Child, ChildFailed

Field = dict[str, Any]
Samples = dict[str, dict[str, list[dict[str, float]]]]
"""Figures of each round, by contender and operation."""

MIB = 1 << 20

PEERS: Mapping[str, tuple[str, Path | str]] = {
    "redhare": ("redhare", PEERS_PYTHON),
    "mooncake": ("mooncake", PEERS_PYTHON),
    "redis-py": ("redis_py", PEERS_PYTHON),
    "lmcache lm://": ("lm", sys.executable),
    "lmcache server": ("lmcache_server", sys.executable),
}
_OTHER_PUT = {
    "redhare": "acknowledges in the putting process's own memory, before anything is on a wire",
    "lmcache server": "writes into the server's shared memory: same machine only",
}
"""Puts that are acknowledged at another point than ours, which is the memory of a remote server."""
_OTHER_GET = {"lmcache server": "reads the server's shared memory: same machine only"}


def local_get_vs_memcpy(quick: bool) -> Field:
    """One Fetch of 64 objects over a Unix socket, against numpy's copy of the same bytes."""
    sizes = {}
    for mib in (1, 8):
        count = 16 if quick else 64
        samples, faults = _rounds(
            {
                "memcpy": ("memcpy", sys.executable, {}),
                "ours": ("ours", sys.executable, {"listen": "unix", "rounds": 1}),
            },
            (count, mib * MIB),
            _count(quick),
            ("get",),
            puts=1,
        )
        sizes[f"{mib}_mib"] = {
            **_against(samples, "memcpy", "get"),
            "objects": count,
            "figures": _medians(samples, "get"),
            "faults": faults,
        }
    value = min(size["cpu_ratio"] for size in sizes.values())
    return {"value": value, "bar": ">= 0.8", "ok": value >= 0.8, **sizes}


class Remote:
    """Get and put over loopback TCP, ours, a raw socket's and the peers', measured once for three
    fields.
    """

    def __init__(self) -> None:
        self._samples: Samples = {}
        self._faults: dict[str, str] = {}
        self._objects = (0, 0)

    def get_vs_raw_socket(self, quick: bool) -> Field:
        """One Fetch of 64 objects of 1 MiB, against `sendall` and `recv_into`."""
        self._measure(quick)
        against = _against(self._samples, "raw socket", "get")
        value = against["cpu_ratio"]
        return {
            "value": value,
            "bar": ">= 0.6",
            "ok": value >= 0.6,
            **against,
            "against_raw_socket_with_checksums": _against(
                self._samples, "raw socket, checksums", "get"
            ),
            "tls_against_raw_socket_in_the_clear": _against(
                self._samples, "raw socket", "get", "ours, TLS"
            )
            if "ours, TLS" in self._samples
            else self._faults.get("ours, TLS"),
            "figures": {
                name: figures
                for name, figures in _medians(self._samples, "get").items()
                if name not in PEERS
            },
            "objects": self._objects,
        }

    def get_vs_best_peer(self, quick: bool) -> Field:
        """The same get, against the best peer's."""
        self._measure(quick)
        return self._versus("get", _OTHER_GET)

    def put_vs_best_peer(self, quick: bool) -> Field:
        """Put of 64 objects of 1 MiB, acknowledged when they are in the server's memory."""
        self._measure(quick)
        return self._versus("put", _OTHER_PUT)

    def _versus(self, op: str, other: Mapping[str, str]) -> Field:
        medians = _medians(self._samples, op)
        ours = medians["ours"]
        peers = {n: f for n, f in medians.items() if n in PEERS and n not in other}
        if not peers:
            return {"value": None, "ok": False, "bar": ">= 1", "faults": self._faults}
        cheapest = min(peers, key=lambda n: peers[n]["cpu_ms_per_mib"])
        fastest = max(peers, key=lambda n: peers[n]["gib_per_s"])
        cpu = peers[cheapest]["cpu_ms_per_mib"] / ours["cpu_ms_per_mib"]
        rate = ours["gib_per_s"] / peers[fastest]["gib_per_s"]
        return {
            "value": min(cpu, rate),
            "bar": ">= 1 in CPU per MiB and in GiB/s",
            "ok": min(cpu, rate) >= 1,
            "cpu_ratio": cpu,
            "rate_ratio": rate,
            "best_in_cpu": cheapest,
            "best_in_rate": fastest,
            "figures": medians,
            "not_comparable": {n: why for n, why in other.items() if n in medians},
            "peers_that_ran": sorted(set(medians) & set(PEERS)),
            "peers_that_did_not": {n: w for n, w in self._faults.items() if n in PEERS},
            "objects": self._objects,
        }

    def _measure(self, quick: bool) -> None:
        if self._samples:
            return
        rounds = _count(quick)
        contenders: dict[str, tuple[str, Path | str, dict[str, Any]]] = {
            "raw socket": ("raw", sys.executable, {"checksum": False}),
            "raw socket, checksums": ("raw", sys.executable, {"checksum": True}),
            "ours": ("ours", sys.executable, {"listen": "tcp", "rounds": rounds + 1}),
            "ours, TLS": (
                "ours",
                sys.executable,
                {"listen": "tcp", "rounds": rounds + 1, "tls": True},
            ),
        }
        contenders |= {name: (*peer, {"rounds": rounds + 1}) for name, peer in PEERS.items()}
        self._objects = (16 if quick else 64, MIB)
        self._samples, self._faults = _rounds(
            contenders, self._objects, rounds, ("put", "get"), puts=rounds + 1
        )


def _count(quick: bool) -> int:
    return 3 if quick else 9


def _rounds(
    contenders: Mapping[str, tuple[str, Path | str, dict[str, Any]]],
    shape: tuple[int, int],
    rounds: int,
    measured: tuple[str, ...],
    *,
    puts: int,
) -> tuple[Samples, dict[str, str]]:
    """Runs every contender once a round, in turn; the first round warms up and is thrown away.

    A contender that fails is left out from then on, with what it said.
    """
    running: dict[str, Child] = {}
    samples: Samples = {}
    faults: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for name, (role, python, settings) in contenders.items():
            if not Path(python).exists():
                faults[name] = "not installed: see requirements-peers.txt"
                continue
            with _noting(faults, name):
                child = Child(role, python=python, shape=list(shape), **settings)
                stack.callback(child.close)
                running[name] = child
        for number in range(rounds + 1):
            for name in [name for name in running if name not in faults]:
                with _noting(faults, name):
                    figures = _round(running[name], number, measured, puts)
                    for op, figure in figures.items() if number else ():
                        samples.setdefault(name, {}).setdefault(op, []).append(figure)
    for name in faults:
        samples.pop(name, None)
    if "ours" in faults:
        raise ChildFailed(faults["ours"])
    return samples, faults


@contextlib.contextmanager
def _noting(faults: dict[str, str], name: str) -> Iterator[None]:
    try:
        yield
    except ChildFailed as error:
        faults[name] = str(error)


def _round(
    child: Child, number: int, measured: tuple[str, ...], puts: int
) -> dict[str, dict[str, float]]:
    figures = {}
    if number < puts:
        figures["put"] = child.ask("put", number=number)
        if not number and not child.ask("check")["same"]:
            raise ChildFailed("what came back is not what was put")
    figures["get"] = child.ask("get")
    return {op: figures[op] for op in measured if op in figures}


def _medians(samples: Samples, op: str) -> dict[str, dict[str, float]]:
    return {
        name: {key: statistics.median(f[key] for f in ops[op]) for key in ops[op][0]}
        | {"most_gib_per_s": max(f["gib_per_s"] for f in ops[op])}
        for name, ops in samples.items()
    }


def _against(samples: Samples, limit: str, op: str, name: str = "ours") -> dict[str, float]:
    """Ours against a physical limit: medians of the ratios of each round."""
    pairs = list(zip(samples[name][op], samples[limit][op], strict=True))
    return {
        "cpu_ratio": statistics.median(
            there["cpu_ms_per_mib"] / ours["cpu_ms_per_mib"] for ours, there in pairs
        ),
        "rate_ratio": statistics.median(
            ours["gib_per_s"] / there["gib_per_s"] for ours, there in pairs
        ),
    }
