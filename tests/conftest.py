"""Environment of every test: LMCache reports to nobody and prints nothing."""

import os

os.environ.update(
    LMCACHE_TRACK_USAGE="false",
    LMCACHE_LOG_LEVEL="ERROR",
    LMCACHE_DISABLE_BANNER="1",
    DO_NOT_TRACK="1",
)
