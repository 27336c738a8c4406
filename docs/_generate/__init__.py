"""Parts of the documentation that are made from the code; used by `docs/conf.py` and by tests."""
