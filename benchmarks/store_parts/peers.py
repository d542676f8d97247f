"""The peers, each with its own server processes. Runs in the peers' environment or in ours.

Same acknowledgement point as ours where the peer has one: the bytes are in the server's memory.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from loopback import free_port

from store_parts.children import (
    Child,
    answer_commands,
    start,
    stop,
    wait_for_port,
)
from store_parts.contender import Blob, addresses, objects, serve_contender, touched


class RedisPy:
    """redis-py with hiredis, one SET and one GET per object: its fastest calls at 1 MiB."""

    def __init__(self, blob: Blob) -> None:
        import redis

        self._process, self.port = _redis()
        self.servers = [self._process.pid]
        self._blob, self._number = blob, 0
        self._redis = redis.Redis(port=self.port)
        self._got: list[Any] = []

    def put(self, number: int) -> None:
        """One SET per object, each acknowledged."""
        self._number = number
        for i, row in enumerate(self._blob):
            self._redis.set(f"{number}:{i}", row.data)

    def get(self) -> None:
        """One GET per object."""
        self._got = [self._redis.get(f"{self._number}:{i}") for i in range(len(self._blob))]

    def got(self) -> Blob:
        """What came."""
        return np.frombuffer(b"".join(self._got), np.uint8)

    def close(self) -> None:
        """Ends the server."""
        self._redis.close()
        stop(self._process)


class Redhare:
    """redhare over TCP: the objects lie in another process, which put them into its own memory."""

    def __init__(self, blob: Blob, rounds: int) -> None:
        self._process, port = _redis()
        capacity = f"{blob.nbytes * (rounds + 2) >> 20}MB"
        self._provider = Child(
            "redhare_provider",
            python=sys.executable,
            shape=list(blob.shape),
            redis_port=port,
            capacity=capacity,
        )
        self.servers = [self._process.pid, self._provider.pid]
        self._store = _redhare("reader", port, "64MB")
        self._number, self._room = 0, touched(*blob.shape)
        self._store.register_buffer(self._room.ctypes.data, self._room.nbytes)

    def put(self, number: int) -> None:
        """The provider's own put, a copy within it, until its metadata can be seen from here."""
        self._number = number
        self._provider.ask("put", number=number)
        keys = [f"{number}:{i}" for i in range(len(self._room))]
        deadline = time.monotonic() + 10
        while min(self._store.batch_is_exist(keys)) < 1:
            assert time.monotonic() < deadline, "redhare: what was put is not seen"
            time.sleep(0.001)

    def get(self) -> None:
        """Gets in batches of 8, its best."""
        places = [([at], [self._room.shape[1]]) for at in addresses(self._room)]
        for first in range(0, len(places), 8):
            batch = places[first : first + 8]
            keys = [f"{self._number}:{first + i}" for i in range(len(batch))]
            codes = self._store.batch_get_into_multi_buffers(
                keys, [a for a, _ in batch], [s for _, s in batch]
            )
            assert not any(codes), f"redhare: {codes}"

    def got(self) -> Blob:
        """What came."""
        return self._room

    def close(self) -> None:
        """Ends the servers."""
        self._store.close()
        self._provider.close()
        stop(self._process)


class Mooncake:
    """Mooncake's store over TCP, without CUDA: master and segment in processes of their own."""

    def __init__(self, blob: Blob, rounds: int) -> None:
        rpc = free_port()
        binary = Path(sys.executable).parent / "mooncake_master"
        ports = [f"-rpc_port={rpc}", f"-metrics_port={free_port()}"]
        self._master = start(binary, *ports, "-rpc_address=127.0.0.1")
        wait_for_port(rpc, self._master)
        size = blob.nbytes * (rounds + 2) + (64 << 20)
        self._provider = Child("mooncake_provider", python=sys.executable, size=size, rpc=rpc)
        self.servers = [self._master.pid, self._provider.pid]
        self._store = _mooncake(0, rpc)
        self._blob, self._number, self._room = blob, 0, touched(*blob.shape)
        for buffer in (self._blob, self._room):
            self._store.register_buffer(buffer.ctypes.data, buffer.nbytes)

    def put(self, number: int) -> None:
        """Puts in batches of 8 from registered memory."""
        self._number = number
        self._batches(self._blob, self._store.batch_put_from, 0)

    def get(self) -> None:
        """Gets in batches of 8 into registered memory, its best."""
        self._batches(self._room, self._store.batch_get_into, self._room.shape[1])

    def got(self) -> Blob:
        """What came."""
        return self._room

    def close(self) -> None:
        """Ends the servers."""
        self._store.close()
        self._provider.close()
        stop(self._master)

    def _batches(self, blob: Blob, call: Any, wanted: int) -> None:  # noqa: ANN401 - a method
        places, size = addresses(blob), blob.shape[1]
        for first in range(0, len(places), 8):
            batch = places[first : first + 8]
            keys = [f"{self._number}:{first + i}" for i in range(len(batch))]
            codes = call(keys, batch, [size] * len(batch))
            assert all(code == wanted for code in codes), f"mooncake: {codes}"


class Lm:
    """LMCache's own remote server, `lm://`, one connection, as its connector speaks to it."""

    def __init__(self, blob: Blob) -> None:
        import socket

        port = free_port()
        self._process = start(
            sys.executable, "-P", "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"
        )
        wait_for_port(port, self._process)
        self.servers = [self._process.pid]
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._blob, self._number, self._room = blob, 0, touched(*blob.shape)

    def put(self, number: int) -> None:
        """PUT has no answer; an EXIST of the last object stands for one."""
        self._number = number
        for i, row in enumerate(self._blob):
            self._send("PUT", i, len(row))
            self._socket.sendall(row)
        self._send("EXIST", len(self._blob) - 1, 0)
        assert self._answer().code == 200, "lm:// does not have what was put"

    def get(self) -> None:
        """One GET per object, received in place."""
        for i, row in enumerate(self._room):
            self._send("GET", i, 0)
            assert self._answer().length == len(row), "lm:// has another object"
            self._fill(memoryview(row))

    def got(self) -> Blob:
        """What came."""
        return self._room

    def close(self) -> None:
        """Ends the server."""
        self._socket.close()
        stop(self._process)

    def _send(self, command: str, i: int, length: int) -> None:
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.protocol import ClientCommand, ClientMetaMessage

        key = CacheEngineKey("bench", 1, 0, self._number << 20 | i, torch.uint8)
        self._socket.sendall(
            ClientMetaMessage(
                ClientCommand[command],
                key,
                length,
                MemoryFormat(1),
                torch.uint8,
                torch.Size([max(length, 1), 1, 1, 1]),
            ).serialize()
        )

    def _answer(self) -> Any:  # noqa: ANN401 - its message
        from lmcache.v1.protocol import ServerMetaMessage

        head = bytearray(ServerMetaMessage.packlength())
        self._fill(memoryview(head))
        return ServerMetaMessage.deserialize(bytes(head))

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionError("lm:// went away")
            view = view[count:]


class LMCacheServer:
    """`lmcache server` with the client of LMCache's own benchmark, engine-driven, on CPU."""

    def __init__(self, blob: Blob, rounds: int) -> None:
        from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
        from lmcache.cli.commands.bench.server_bench.config import BenchConfig

        port, http, metrics = free_port(), free_port(), free_port()
        size_gb = -(-blob.nbytes * (rounds + 2) >> 30) + 1
        binary = Path(sys.executable).parent / "lmcache"
        self._process = start(
            *(binary, "server", "--host", "127.0.0.1", "--port", str(port)),
            *("--http-host", "127.0.0.1", "--http-port", str(http)),
            *("--prometheus-port", str(metrics), "--l1-size-gb", str(size_gb)),
            *("--eviction-policy", "LRU", "--chunk-size", "256"),
            *("--supported-transfer-mode", "engine_driven"),
        )
        wait_for_port(http, self._process, 60)
        self.servers = [self._process.pid]
        layers = blob.shape[1] // (256 * 2 * 8 * 64 * 2)
        tokens = len(blob) * 256
        self._tokens = tokens
        config = BenchConfig(
            rpc_url=f"tcp://127.0.0.1:{port}",
            http_url=f"http://127.0.0.1:{http}",
            mode="cpu",
            transfer_mode="engine_driven",
            tp_size=1,
            use_mla=False,
            num_tokens=tokens,
            kvcache_shape_spec=f"(2,{2 * tokens // 16},16,8,64):bfloat16:{layers}",
            num_blocks=2 * tokens // 16,
            block_size=16,
        )
        self._client = ServerBenchClient(config, lambda _: None)
        self._client.start()
        self._blob, self._number = blob, 0

    def put(self, number: int) -> None:
        """STORE of all chunks, after the lookup that its protocol wants."""
        self._number = number
        request = self._request("cold")
        self._client.lookup(request)
        result = self._client.store(request, 0, self._tokens)
        assert result is not None, "nothing to store"
        assert result.succeeded, result
        self._client.end_session(request)

    def get(self) -> None:
        """Lookup and RETRIEVE of all chunks."""
        request = self._request("warm")
        found = self._client.lookup(request)
        assert found.is_full_hit, f"{found.hit_chunks} of {found.total_chunks} chunks"
        result = self._client.retrieve(request, 0, self._tokens)
        assert result is not None, "nothing to retrieve"
        assert result.succeeded, result
        self._client.end_session(request)

    def got(self) -> Blob:
        """Its client compares checksums of its own tensors; that it retrieved all is enough."""
        return self._blob

    def close(self) -> None:
        """Ends the server."""
        with contextlib.suppress(Exception):
            self._client.close()
        stop(self._process)

    def _request(self, kind: str) -> Any:  # noqa: ANN401 - its type
        # Its tokens differ from the first on, so numbers share no chunk.
        request = self._client.create_request(self._number, f"{kind}-{self._number}", kind)
        assert request is not None, "no whole chunk"
        return request


def peer_child(kind: str, shape: list[int], rounds: int) -> None:
    """Role of a peer's client."""
    blob = objects(*shape)
    made = {
        "redhare": lambda: Redhare(blob, rounds),
        "mooncake": lambda: Mooncake(blob, rounds),
        "redis_py": lambda: RedisPy(blob),
        "lm": lambda: Lm(blob),
        "lmcache_server": lambda: LMCacheServer(blob, rounds),
    }[kind]()
    serve_contender(made, blob)


def redhare_provider_child(shape: list[int], redis_port: int, capacity: str) -> None:
    """Role of redhare's process that holds the objects."""
    blob, store = objects(*shape), _redhare("provider", redis_port, capacity)
    places = [[at] for at in addresses(blob)]

    def put(number: int) -> dict[str, Any]:
        keys = [f"{number}:{i}" for i in range(len(blob))]
        codes = store.batch_put_from_multi_buffers(keys, places, [[blob.shape[1]]] * len(keys))
        assert not any(codes), f"redhare: {codes}"
        return {}

    answer_commands({}, {"put": put})
    store.close()


def mooncake_provider_child(size: int, rpc: int) -> None:
    """Role of Mooncake's process that has the memory."""
    store = _mooncake(size, rpc)
    answer_commands({}, {})
    store.close()


def _redis() -> tuple[subprocess.Popen[bytes], int]:
    port = free_port()
    folder = tempfile.gettempdir()
    process = start(
        *("redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", folder),
        *("--save", "", "--appendonly", "no"),
    )
    wait_for_port(port, process)
    return process, port


def _redhare(client_id: str, redis_port: int, capacity: str) -> Any:  # noqa: ANN401 - its class
    from redhare import KvStore

    return KvStore(
        redis_url=f"redis://127.0.0.1:{redis_port}",
        client_id=client_id,
        data_plane_addr=f"127.0.0.1:{free_port()}",
        capacity=capacity,
        transport="tcp",
    )


def _mooncake(segment_bytes: int, rpc: int) -> Any:  # noqa: ANN401 - its class
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    here, master = f"127.0.0.1:{free_port()}", f"127.0.0.1:{rpc}"
    code = store.setup(here, "P2PHANDSHAKE", segment_bytes, 64 << 20, "tcp", "", master)
    assert not code, f"mooncake: setup gave {code}"
    return store
