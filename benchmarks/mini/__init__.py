"""Small trained hybrids: tokenizer, tasks, training path, scores, weights."""
