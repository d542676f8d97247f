"""What benchmarks/vllm.py is made of."""
