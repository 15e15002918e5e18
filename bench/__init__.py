"""Benchmarks that compare jingu with its alternatives. `make bench` runs all of them."""
