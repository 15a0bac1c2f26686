"""What the CPU kernels read: pages, packed runs and pieces as plain integer arrays, and where a block of a run stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numba import njit

from agentcache.kernels.formats import BLOCK, PackedFormat, Tag, value_groups
from agentcache.kernels.layout import PageLayout, Strides
from agentcache.kernels.packed import Rotation, rotary_planes

__all__ = ["Geometry", "Records", "block_span", "element_type", "stretch_records"]

EXACT, K8V8, K8V4 = (tag.code for tag in Tag)

# Columns of a geometry.
HEADS, DIM, GROUPS, ESIZE, PAGE_TOKENS, PAGE_STRIDE = range(6)
K_LINES, K_STREAM, K_BASE, K_HEAD, K_DIM = range(6, 11)
V_ROWS, V_STREAM, V_BASE, V_HEAD, V_TOKEN = range(11, 16)
# Columns of a tag's format; a group is `32 << GROUP_SHIFT` tokens.
GROUP_SHIFT, SCALE_BYTES, TOKEN_BYTES = range(3)
# Columns of a stretch: tokens [START, START + LENGTH) of the packed run at DATA stand at positions from DST on.
DATA, RUN_TOKENS, LAYER_BYTES, TAG, START, LENGTH, DST, ANGLE = range(8)
NO_TURN = -1  # ANGLE of a stretch whose keys stay as they are

_LINE_BYTES = 64
_ELEMENTS = {torch.bfloat16: np.uint16, torch.float16: np.int16, torch.float32: np.float32}


def element_type(dtype: torch.dtype) -> type:
    """Returns the numpy type that names a KV dtype to the kernels.

    Raises:
        ValueError: The dtype is no KV dtype.
    """
    if dtype not in _ELEMENTS:
        raise ValueError(f"dtype={dtype}: KV is one of {', '.join(str(d) for d in _ELEMENTS)}")
    return _ELEMENTS[dtype]


@dataclass(frozen=True, eq=False)
class Geometry:
    """A page layout as the kernels read it.

    Attributes:
        values: int64, one number a column.
        k_cells: int64 `[H, B, D]`, read where K has no lines.
        v_cells: int64 `[H, B, D]`, read where V has no rows.
        formats: int64 `[tags, 3]`.
        planes: int64 `[2, rotary_dim / 2]`, the two dimensions of each plane.
        like: An empty array of the element type.
    """

    values: np.ndarray
    k_cells: np.ndarray
    v_cells: np.ndarray
    formats: np.ndarray
    planes: np.ndarray
    like: np.ndarray

    @classmethod
    def build(cls, layout: PageLayout, layers: int, dtype: torch.dtype, rotation: Rotation | None) -> Geometry:
        """Returns the geometry of a layout and dtype."""
        heads, block, dim = layout.shape
        size = torch.empty((), dtype=dtype).element_size()
        none = Strides(0, 0, 0, 0)
        k, v = layout.k_strides or none, layout.v_strides or none
        # A destination line of 32 positions lies in one page, so that its address is computed once.
        lines = layout.k_strides is not None and k.token == 1 and block % BLOCK == 0
        rows = layout.v_strides is not None and v.dim == 1 and block % BLOCK == 0

        def whole(*strides: int) -> bool:
            return all(s * size % _LINE_BYTES == 0 for s in (layout.page_stride, *strides))

        values = np.zeros(16, np.int64)
        values[[HEADS, DIM, GROUPS, ESIZE]] = heads, dim, value_groups(dim), size
        values[[PAGE_TOKENS, PAGE_STRIDE]] = block, layout.page_stride
        values[[K_LINES, K_STREAM]] = lines, lines and whole(k.base, k.head, k.dim)
        values[[V_ROWS, V_STREAM]] = rows, rows and whole(v.base, v.head, v.token, dim)
        values[[K_BASE, K_HEAD, K_DIM]] = k.base, k.head, k.dim
        values[[V_BASE, V_HEAD, V_TOKEN]] = v.base, v.head, v.token
        forms = [PackedFormat(tag, layers, heads, dim, size) for tag in Tag]
        planes = (
            torch.stack(rotary_planes(rotation)) if rotation is not None else torch.zeros((2, 0), dtype=torch.int64)
        )
        return cls(
            values,
            layout.k_cells.numpy(),
            layout.v_cells.numpy(),
            np.array([(f.group_tokens // BLOCK // 2, f.scale_bytes, f.token_bytes) for f in forms], np.int64),
            planes.numpy(),
            np.empty(0, element_type(dtype)),
        )

    def for_pages(self, addresses: np.ndarray) -> np.ndarray:
        """Returns the values for layers at these addresses: streaming needs pages that start on a cache line."""
        if not (addresses % _LINE_BYTES).any():
            return self.values
        values = self.values.copy()
        values[[K_STREAM, V_STREAM]] = 0
        return values


Records = np.ndarray


def stretch_records(rows: Sequence[tuple[int, int, int, int, int, int, int, int]]) -> Records:
    """Returns stretches as int64 `[n, 8]`."""
    return np.array(rows, np.int64).reshape(-1, 8)


@njit(inline="always")
def block_span(layer_at, tokens, form, heads, head, block):
    """Returns where a block of a run stands: (address of its key scales, its own address, its tokens).

    The same sums as `PackedFormat.block_span`, by shifts: a division costs as much as a row.

    Args:
        layer_at: Address of the layer in the run.
        tokens: Tokens of the run.
        form: The tag's format (GROUP_SHIFT, SCALE_BYTES, TOKEN_BYTES).
        heads: H.
        head: KV head.
        block: Block of the run.
    """
    shift, scale_bytes, token_bytes = form
    group = block >> shift
    whole = BLOCK << shift
    group_tokens = min(whole, tokens - group * whole)
    scales = (
        layer_at
        + group * heads * (scale_bytes + whole * token_bytes)
        + head * (scale_bytes + group_tokens * token_bytes)
    )
    at = scales + scale_bytes + (block - (group << shift)) * BLOCK * token_bytes
    return scales, at, min(BLOCK, tokens - block * BLOCK)
