"""LMCache#2136: None in a name hashed differently in each process."""

from tailreplay.store.namespace import NamespaceFields

GOLDEN = {
    None: "75cc7645d890b28ec06ea3302a0c1caeef4fb2da852c574d01296c904bc3286d",
    "None": "f7cbe1dbd3ab73cea8c63ddbcfc3775672d0d4c3cf823fb0f2309788953f60f6",
    "": "7813bfa285e16789979b81b3d65d954f9e5ce657cb0c326e8cceb913e07c197e",
}


def test_no_adapter_has_one_name_in_every_process_and_no_string_has_it_too():
    for adapter, digest in GOLDEN.items():
        fields = NamespaceFields(model={"layers": 8}, weights_id="w", adapter_digest=adapter)
        assert fields.digest().hex() == digest
