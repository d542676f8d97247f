"""tailreplay.proto."""
