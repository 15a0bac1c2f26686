"""Where the rows of a KV page stand: by strides, or by a table of cells where a backend packs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["PageLayout", "Strides"]


class Strides(NamedTuple):
    """Offset and strides of one tensor (K or V) in a page, in elements: `base + head * h + token * t + dim * d`."""

    base: int
    head: int
    token: int
    dim: int

    def cells(self, shape: tuple[int, int, int]) -> torch.Tensor:
        """Returns the offset of every cell of a page, int64 `[H, B, D]`."""
        h, b, d = (torch.arange(n) for n in shape)
        return self.base + h[:, None, None] * self.head + b[None, :, None] * self.token + d[None, None, :] * self.dim


@dataclass(frozen=True, eq=False)
class PageLayout:
    """Storage offsets of K and V in a backend's pages, in elements from the start of a layer's KV tensor.

    A cell of page p stands at `p * page_stride + k_cells[h, b, d]`. Where offsets are affine the kernels use the strides,
    else the table, as for the pages that AMX packs in pairs.

    Attributes:
        page_stride: Elements between two pages.
        k_cells: Offsets of K in a page, int64 `[H, B, D]` (B tokens a page), on the host.
        v_cells: Offsets of V.
        k_strides: K's strides, or None where it is not affine.
        v_strides: V's.
    """

    page_stride: int
    k_cells: torch.Tensor
    v_cells: torch.Tensor
    k_strides: Strides | None
    v_strides: Strides | None

    @classmethod
    def from_strides(cls, shape: tuple[int, int, int], page_stride: int, k: Strides, v: Strides) -> PageLayout:
        """Returns an affine layout of pages of `shape` (H, B, D)."""
        return cls.from_cells(page_stride, k.cells(shape), v.cells(shape))

    @classmethod
    def from_cells(cls, page_stride: int, k_cells: torch.Tensor, v_cells: torch.Tensor) -> PageLayout:
        """Returns the layout of probed cells; finds the strides where there are any.

        Args:
            page_stride: Elements between two pages.
            k_cells: Offsets of K in page 0, `[H, B, D]`.
            v_cells: Offsets of V.

        Raises:
            ValueError: K and V differ in shape, two cells share a place, or a cell lies before its page.
        """
        k, v = (x.detach().to("cpu", torch.int64).contiguous() for x in (k_cells, v_cells))
        if k.dim() != 3 or k.shape != v.shape:
            raise ValueError(f"k_cells {tuple(k.shape)} and v_cells {tuple(v.shape)} must have one shape [H, B, D]")
        both = torch.cat((k.flatten(), v.flatten()))
        if len(both.unique()) != len(both):
            raise ValueError("k_cells and v_cells name a place twice: a page layout must be a permutation of its rows")
        if int(both.min()) < 0:
            raise ValueError(f"a cell lies {-int(both.min())} elements before its page")
        return cls(page_stride, k, v, _affine(k), _affine(v))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, B, D): KV heads, tokens a page, head dim."""
        heads, block, dim = self.k_cells.shape
        return heads, block, dim

    @property
    def extent(self) -> int:
        """Elements from the start of page 0 to the end of its last cell."""
        return max(int(self.k_cells.max()), int(self.v_cells.max())) + 1


def _affine(cells: torch.Tensor) -> Strides | None:
    base = int(cells[0, 0, 0])
    heads, block, dim = cells.shape
    strides = Strides(
        base,
        int(cells[1, 0, 0]) - base if heads > 1 else 0,
        int(cells[0, 1, 0]) - base if block > 1 else 0,
        int(cells[0, 0, 1]) - base if dim > 1 else 0,
    )
    return strides if torch.equal(strides.cells((heads, block, dim)), cells) else None
