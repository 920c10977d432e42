"""Benchmarks of the library against its peers; run them as modules: ``python -m benchmarks.checkpoint``."""
