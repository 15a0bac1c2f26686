"""Episodes, versions and diffs: pure Python."""
