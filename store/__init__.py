"""tailreplay.store."""
