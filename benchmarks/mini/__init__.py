"""Small trained hybrids of the Qwen3.5 family: tokenizer, tasks, training path, scores, weights."""
