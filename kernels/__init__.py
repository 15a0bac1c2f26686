"""One kernel a file, each beside its float32 twin in `reference.py`."""
