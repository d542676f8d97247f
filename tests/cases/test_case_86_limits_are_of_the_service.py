"""LMCache#1399: a limit on disk held for each rank, so that eight ranks filled the node."""

import json
import os
from contextlib import closing

from store_objects import Client, Prefix
from typer.testing import CliRunner

from tailreplay.store import serve_in_thread
from tailreplay.store.cli import app
from tailreplay.store.cli_tables import human_bytes
from tailreplay.store.objects import Kind

POOL_BYTES = 8 << 20
RANKS = 8


def test_eight_writers_share_one_limit_and_it_is_printed_in_total():
    with serve_in_thread(pool_bytes=POOL_BYTES) as server:
        for _ in range(RANKS):
            with closing(Client(server.address)) as rank:
                for _ in range(3):
                    prefix = Prefix(os.urandom(32), range(40 * 256))
                    assert rank.put(prefix, prefix.spans(Kind.KV)).dropped == 0
                answer = rank.stats()
                assert answer.pool_used_bytes <= answer.pool_bytes == POOL_BYTES
        assert answer.stored_bytes > POOL_BYTES
        words = ["doctor", "--url", server.address, "--format", "json"]
        checks = json.loads(CliRunner().invoke(app, words).stdout)["checks"]
        (pool,) = [check["found"] for check in checks if check["check"] == "pool"]
        assert pool == f"{human_bytes(POOL_BYTES)} for all engines and tenants together"
