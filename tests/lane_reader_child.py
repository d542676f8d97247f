"""A reader or writer in a process of its own that halts half way, to be killed there or let go on.

lane_reader_child.py ADDRESS NAMESPACE fetch|put
"""

import sys

from lane_objects import WAIT_S, objects
from life import PREFIX, RANGE
from store_objects import Prefix

from tailreplay.connector.client import StoreClient
from tailreplay.connector.put_frames import ObjectBytes


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def halt() -> None:
    say("there")
    if not sys.stdin.readline():
        sys.exit(1)


prefix = Prefix(bytes.fromhex(sys.argv[2]), PREFIX.ids)
client = StoreClient(sys.argv[1], match_timeout_s=WAIT_S, call_timeout_s=WAIT_S)
if sys.argv[3] == "fetch":
    leaf = client.match(prefix.namespace, prefix.tokens).leaf
    steps = iter(client.fetch(prefix.namespace, leaf, [RANGE], timeout_s=WAIT_S))
    next(steps)
    halt()
    say(f"{sum(1 for _ in steps)} more")
else:
    first, second, *rest = objects(prefix)
    held = second.parts
    held_back = ObjectBytes(second.announce, lambda: halt() or held)
    client.put(prefix.namespace, prefix.tokens, [first, held_back, *rest], timeout_s=WAIT_S)
