"""sglang PR 31398: lookups of the storage that miss block scheduling and take buffers all the same.

What they cost beside a prefill is measured by `benchmarks/store.py --only zero_reuse_overhead`.
"""

import statistics

import pytest
from case_helpers import STORE, ask, prompt, replica

from tailreplay.store import serve_in_thread

pytestmark = pytest.mark.model


def test_lookups_that_find_nothing_load_nothing_and_hold_nothing():
    with serve_in_thread(**STORE) as server, replica(server.address) as engine:
        ask(engine, [0, *prompt(700)])
        before = server.store.stats()
        reports = [ask(engine, [seed, *prompt(300)]).report for seed in range(1, 21)]
        after = server.store.stats()
        assert [r["matched_tokens"] for r in reports] == [0] * 20
        for report in reports:
            assert (report["mode"], report["miss_reason"]) == ("miss", "not_stored")
            assert (report["rpcs"], report["bytes"]) == (1, {})
        assert (after.leases, after.pinned_bytes) == (0, 0)
        assert after.lookups - before.lookups == 20
        waited = [r["phases_s"]["match"] / r["ttft_s"] for r in reports]
        assert statistics.median(waited) < 0.2
