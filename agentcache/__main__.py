"""`python -m agentcache`: the command line."""

from __future__ import annotations

import sys

from agentcache.cli import main

if __name__ == "__main__":
    # `python -m` puts the working directory first on sys.path. In a checkout, its folder `kernels` would stand in for
    # the library of that name, which transformers imports; the engine's processes inherit the path.
    if not sys.flags.safe_path:
        del sys.path[0]
    main()
