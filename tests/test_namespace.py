"""The namespace digest: another one as soon as any field differs."""

import itertools

import pytest
from pydantic import ValidationError

from tailreplay.store.namespace import NamespaceFields, tenant_digest

BASE = {
    "model": {
        "model_type": "qwen3_5_text",
        "layers": 4,
        "rope": {"theta": 10000.0, "scaling": None},
    },
    "weights_id": "sha256:00",
    "tokenizer_id": "t",
    "adapter_digest": None,
    "tenant_salt": "s",
    "kv_dtype": "float32",
    "quantisation": None,
    "format_version": 2,
}
OTHERS = {
    "model": [
        {},
        BASE["model"] | {"layers": 5},
        BASE["model"] | {"layers": "4"},
        BASE["model"] | {"layers": 4.0},
        BASE["model"] | {"rope": {"theta": 10000.0}},
        BASE["model"] | {"rope": {"theta": 20000.0, "scaling": None}},
        BASE["model"] | {"rope": {"theta": 10000.0, "scaling": "None"}},
    ],
    "weights_id": ["", "sha256:01", "sha256:00 "],
    "tokenizer_id": ["", "T"],
    "adapter_digest": ["", "None", "null"],
    "tenant_salt": ["", "S"],
    "kv_dtype": ["bfloat16"],
    "quantisation": ["", "None", "fp8"],
    "format_version": [1],
}


def digest(**changed: object) -> bytes:
    return NamespaceFields.model_validate(BASE | changed).digest()


def test_digests_are_the_golden_ones():
    assert digest().hex() == "f8d5faf5d7e54e1833a5d5cf93ff6557b3876b149ca77c2af9537d3aa95c5de6"
    empty = NamespaceFields(model={}, weights_id="").digest()
    assert empty.hex() == "96663e45ab7c558940e02c0180ce3ce6e085bb7f9a3fbee6d3a54d5e9958447d"


def test_every_field_is_covered():
    assert set(BASE) == set(OTHERS) == set(NamespaceFields.model_fields)


@pytest.mark.parametrize("field", OTHERS)
def test_a_change_of_one_field_gives_another_digest(field):
    digests = {digest(), *(digest(**{field: value}) for value in OTHERS[field])}
    assert len(digests) == 1 + len(OTHERS[field])


def test_a_value_in_another_field_is_another_namespace():
    names = [name for name in BASE if name not in ("model", "format_version")]
    empty = BASE | dict.fromkeys(names, "")
    digests = {NamespaceFields.model_validate(empty | {name: "x"}).digest() for name in names}
    assert len(digests) == len(names)


def test_text_can_not_move_from_one_field_to_the_next():
    pairs = itertools.permutations(["ab", "a", "b", ""], 2)
    digests = [digest(tenant_salt=a, tokenizer_id=b) for a, b in pairs]
    assert len(set(digests)) == len(digests)


def test_the_order_of_config_keys_does_not_matter():
    turned = {key: BASE["model"][key] for key in reversed(BASE["model"])}
    assert digest(model=turned) == digest()


def test_a_field_that_nobody_knows_is_refused():
    with pytest.raises(ValidationError, match="rank"):
        NamespaceFields.model_validate(BASE | {"rank": 0})


def test_a_tenants_digest_is_the_same_for_ever_and_none_has_none():
    assert tenant_digest("acme").hex() == "39a0193f1482c6463d7a3846179ef56e"
    assert tenant_digest("") == b""
    assert len({tenant_digest(name) for name in ("a", "b", "ab", "a\0b")}) == 4
