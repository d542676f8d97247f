"""LMCache#2136: None in a name hashed differently in each process."""

from tailreplay.store.namespace import NamespaceFields

GOLDEN = {
    None: "d61bcf68bcf44f0eb03922036c27a986dc29607883da8573e48538c06058eb82",
    "None": "54c53769c3c14db3065c911cc4916bc16f8d8ed188f961adad35de5dad6f92e7",
    "": "87e55d0c032141401e4ed2bcb126da583a47db9026ab0b5d0c2678a09666dfee",
}


def test_no_adapter_has_one_name_in_every_process_and_no_string_has_it_too():
    for adapter, digest in GOLDEN.items():
        fields = NamespaceFields(model={"layers": 8}, weights_id="w", adapter_digest=adapter)
        assert fields.digest().hex() == digest
