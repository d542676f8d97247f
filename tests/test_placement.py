"""Which server has what."""

from collections import Counter

from tailreplay.store.placement import owner

PLACES = ["a:1/0", "b:1/0", "c:1/0"]
DIGESTS = [i.to_bytes(32, "big") for i in range(3000)]


def test_shares_are_even_and_the_order_of_servers_is_of_no_account():
    names = [PLACES[owner(PLACES, digest)] for digest in DIGESTS]
    assert min(Counter(names).values()) > 100
    turned = PLACES[::-1]
    assert [turned[owner(turned, digest)] for digest in DIGESTS] == names


def test_a_server_that_leaves_takes_only_its_own_along():
    for digest in DIGESTS:
        before = owner(PLACES, digest)
        if before < 2:
            assert owner(PLACES[:2], digest) == before


def test_placement_is_what_the_format_page_says():
    assert [owner(PLACES, bytes([i]) * 32) for i in range(8)] == [2, 1, 2, 0, 0, 0, 2, 2]
    assert owner(["alone:1/0"], bytes(32)) == 0
