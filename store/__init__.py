"""The cache service: a token index over objects in CPU memory and Redis, behind gRPC.

`serve_in_thread` starts one in this process. Importing this package loads neither torch nor
lmcache; the server does when it is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailreplay.store.server import serve_in_thread

__all__ = ["serve_in_thread"]


def __getattr__(name: str) -> object:
    if name == "serve_in_thread":
        from tailreplay.store.extras import require

        require(name, "store")
        from tailreplay.store.server import serve_in_thread

        return serve_in_thread
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
