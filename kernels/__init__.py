"""The KV checkpoint's kernels: pack paged KV, restore it elsewhere, read attention off it. Needs torch, and numba or triton.

One op a file for each implementation (`cpu_*`, `triton_*`), each tested by its float32 twin in `reference.py`; `Kernels`
chooses one of them once. `docs/checkpoint-format.md` describes the packed bytes.
"""

from agentcache.kernels.comparison import COMPARISON
from agentcache.kernels.dispatch import IMPLEMENTATIONS, Kernels
from agentcache.kernels.formats import BLOCK, FORMAT_VERSION, PackedFormat, Tag
from agentcache.kernels.layout import PageLayout, Strides
from agentcache.kernels.packed import PackedRun, Piece, Rotation, Source, TableRotation

__all__ = [
    "BLOCK",
    "COMPARISON",
    "FORMAT_VERSION",
    "IMPLEMENTATIONS",
    "Kernels",
    "PackedFormat",
    "PackedRun",
    "PageLayout",
    "Piece",
    "Rotation",
    "Source",
    "Strides",
    "TableRotation",
    "Tag",
]
