"""The only package that uses private APIs of libraries, each behind a small function that documents its purpose.

Nothing here has logic of its own. Each function has a test in `tests/compat`. If a new version of a library removes a
private API, this test fails and names the function, which is then the only place to adapt.
"""
