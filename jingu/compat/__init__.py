"""The only room that uses private names of libraries: each behind a small function that says what it is for.

Nothing here has logic of its own. Each function has a test in tests/compat that fails, naming this function, when a new
version of the library takes the private name away; the function is then the one place to adapt.
"""
