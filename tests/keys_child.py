"""Prints the names that a process gives to a prompt."""

import json
import sys

from tailreplay.store.chain import PrefixChain, digest_key, sealed_tokens
from tailreplay.store.namespace import NamespaceFields
from tailreplay.store.tokens import extended_tokens


def names(fields: dict, ids: list[int]) -> dict[str, object]:
    namespace = NamespaceFields(**fields).digest()
    tokens = extended_tokens(ids)
    chain = PrefixChain(namespace, tokens)
    return {
        "namespace": namespace.hex(),
        "prefixes": [chain.prefix_hash(end).hex() for end in (1, 64, 100)],
        "digest": sealed_tokens(digest_key(namespace), tokens)[-1, 0].tobytes().hex(),
    }


if __name__ == "__main__":
    print(json.dumps(names(**json.load(sys.stdin))))  # noqa: T201
