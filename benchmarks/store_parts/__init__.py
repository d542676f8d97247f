"""Parts of store.py, which puts the folder above this one on the path."""
