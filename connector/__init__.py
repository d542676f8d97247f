"""tailreplay.connector."""
