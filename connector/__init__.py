"""The engine side: a client of the store, and adapters that reuse prefixes in engines.

`StoreClient` talks to a store. `tailreplay.connector.hf` has the Transformers engine. Importing
this package loads neither torch nor an engine.
"""

from tailreplay.connector.client import StoreClient

__all__ = ["StoreClient"]
