"""A store in a process of its own whose time of day is days off: ADDRESS REDIS_URL DAYS.

It says so when it is there, and runs until its standard input ends. What it is built on has the
right time: gRPC compares Python's clock with its own.
"""

import sys
import time
import types

import grpc  # noqa: F401  # these have the right time
import lmcache.v1.distributed.storage_manager  # noqa: F401
import redis  # noqa: F401

ADDRESS, REDIS_URL, DAYS = sys.argv[1:]

wrong = types.ModuleType("time")
vars(wrong).update(vars(time), time=lambda: time.time() + int(DAYS) * 24 * 3600)
sys.modules["time"] = wrong
from tailreplay.store import serve_in_thread  # noqa: E402

sys.modules["time"] = time

with serve_in_thread(listen=ADDRESS, redis_url=REDIS_URL, pool_bytes=8 << 20):
    sys.stdout.write("there\n")
    sys.stdout.flush()
    sys.stdin.read()
