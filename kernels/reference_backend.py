"""The float32 twins as an implementation: any device, any layout, slow."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentcache.kernels import reference
from agentcache.kernels.backend import Backend
from agentcache.kernels.formats import Tag
from agentcache.kernels.packed import PackedRun, Piece, Source

__all__ = ["ReferenceBackend"]


class ReferenceBackend(Backend):
    """Runs `reference.py`."""

    name = "reference"

    def quantize_gather(
        self, pages: Sequence[torch.Tensor], table: torch.Tensor, sources: Sequence[Source]
    ) -> list[PackedRun]:
        """Returns the packed rows of each source."""
        out = []
        for start, length, tag in sources:
            k, v = reference.gather_rows(pages, self.setting.layout, table, start, length)
            out.append(PackedRun(tag, length, reference.pack(k, v, Tag(tag))))
        return out

    def dequantize_scatter(self, pieces: Sequence[Piece], pages: Sequence[torch.Tensor], table: torch.Tensor) -> None:
        """Writes pieces of packed runs into the pages."""
        for piece in pieces:
            form = self.setting.format(Tag(piece.run.tag))
            reference.restore(piece, form, pages, self.setting.layout, table, self.setting.rotation)

    def attention_mass(
        self,
        queries: torch.Tensor,
        positions: torch.Tensor,
        page: torch.Tensor,
        table: torch.Tensor,
        tokens: int,
        scale: float,
    ) -> torch.Tensor:
        """Returns the mean attention of queries on the keys of one layer, float32 `[tokens]`."""
        k, _ = reference.gather_rows([page], self.setting.layout, table, 0, tokens)
        return reference.attention_mass(queries, positions, k[0], scale)

    def value_residual(
        self, pages: Sequence[torch.Tensor], table: torch.Tensor, start: int, length: int
    ) -> torch.Tensor:
        """Returns what 4-bit values would leave of each token, float32 `[length]`."""
        _, v = reference.gather_rows(pages, self.setting.layout, table, start, length)
        return reference.value_residual(v)
