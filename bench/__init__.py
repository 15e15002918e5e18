"""Side-by-side measurements against what people would use instead. `make bench` runs them all."""
