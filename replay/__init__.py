"""tailreplay.replay."""
