"""What benchmarks/traces.py is made of."""
