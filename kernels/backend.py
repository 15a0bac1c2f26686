"""The contract of an implementation of the kernels."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from agentcache.kernels.formats import PackedFormat, Tag
from agentcache.kernels.layout import PageLayout
from agentcache.kernels.packed import PackedRun, Piece, Rotation, Source

__all__ = ["Backend", "Setting"]


@dataclass(frozen=True, eq=False)
class Setting:
    """What an implementation is built for.

    Attributes:
        layout: Where rows stand in a page.
        layers: L.
        dtype: The KV dtype.
        device: Where the pages are.
        rotation: How keys turn, or None for keys without position.
    """

    layout: PageLayout
    layers: int
    dtype: torch.dtype
    device: torch.device
    rotation: Rotation | None

    def format(self, tag: Tag) -> PackedFormat:
        """Returns the byte layout of a tag's runs."""
        heads, _, dim = self.layout.shape
        return _format(tag, self.layers, heads, dim, self.dtype.itemsize)


_format = functools.cache(PackedFormat)


class Backend(ABC):
    """One implementation of the four ops. Arguments are checked by `Kernels`; results are on the pages' device.

    Attributes:
        name: How it is asked for.
    """

    name: ClassVar[str]

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @abstractmethod
    def quantize_gather(
        self, pages: Sequence[torch.Tensor], table: torch.Tensor, sources: Sequence[Source]
    ) -> list[PackedRun]:
        """Returns the packed rows of each source."""

    @abstractmethod
    def dequantize_scatter(self, pieces: Sequence[Piece], pages: Sequence[torch.Tensor], table: torch.Tensor) -> None:
        """Writes pieces of packed runs into the pages."""

    @abstractmethod
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

    @abstractmethod
    def value_residual(
        self, pages: Sequence[torch.Tensor], table: torch.Tensor, start: int, length: int
    ) -> torch.Tensor:
        """Returns what 4-bit values would leave of each token, float32 `[length]`."""
