"""What the kernels take and give: packed runs, the pieces of them to restore, and rotations by a shift."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

__all__ = ["PackedRun", "Piece", "Rotation", "Source", "TableRotation"]


class Source(NamedTuple):
    """Rows to pack: positions `[start, start + length)` of a page table, with the tag of the result."""

    start: int
    length: int
    tag: str


@dataclass(frozen=True, eq=False)
class PackedRun:
    """K and V of consecutive tokens, packed for all layers.

    Attributes:
        tag: A `Tag`, or the name of a comparison format.
        tokens: N.
        data: The bytes, uint8, contiguous, on the device of the pages.
    """

    tag: str
    tokens: int
    data: torch.Tensor


class Piece(NamedTuple):
    """A stretch of a packed run to restore.

    Attributes:
        run: The packed run.
        start: First token of the run.
        length: Tokens.
        dst: Position of the first token in the destination's page table; it need not be aligned to pages or blocks.
        shift: How many positions the keys move (destination position minus the position they were embedded at).
    """

    run: PackedRun
    start: int
    length: int
    dst: int
    shift: int = 0


class Rotation(Protocol):
    """How keys turn with their position; the engine proves one on the model's own rotary module.

    Attributes:
        rotary_dim: Leading dimensions that turn; the rest passes through.
        interleaved: Planes are (0, 1), (2, 3) ... instead of (i, i + rotary_dim / 2).
    """

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions that turn."""
        ...

    @property
    def interleaved(self) -> bool:
        """Whether planes are neighbouring dimensions."""
        ...

    def angles(self, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosine and sine of `shift` positions at unit magnitude, float32 `[rotary_dim / 2]`."""
        ...


@dataclass(frozen=True, eq=False)
class TableRotation:
    """A rotation read from a cos/sin table by position.

    Attributes:
        cos: float32 `[positions, rotary_dim / 2]`, unit magnitude.
        sin: The same.
        interleaved: Planes are neighbouring dimensions.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    @classmethod
    def from_theta(
        cls, rotary_dim: int, positions: int, theta: float = 10_000.0, *, interleaved: bool = False
    ) -> TableRotation:
        """Returns the plain rotary table of a base frequency."""
        frequency = theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
        angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
        return cls(angle.cos().float(), angle.sin().float(), interleaved)

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions that turn."""
        return 2 * self.cos.shape[1]

    def angles(self, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows of |shift|, the sine negated for a negative shift.

        Raises:
            ValueError: The table ends before |shift|.
        """
        if abs(shift) >= len(self.cos):
            raise ValueError(f"shift={shift} is beyond the rotary table of {len(self.cos)} positions")
        sign = -1 if shift < 0 else 1
        return self.cos[abs(shift)], sign * self.sin[abs(shift)]


def rotary_planes(rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first and the second dimension of each plane, int64 `[rotary_dim / 2]`."""
    half = torch.arange(rotation.rotary_dim // 2)
    return (2 * half, 2 * half + 1) if rotation.interleaved else (half, half + rotation.rotary_dim // 2)


def shift_rows(rotation: Rotation | None, pieces: Iterable[Piece]) -> tuple[torch.Tensor, torch.Tensor, dict[int, int]]:
    """Returns the angles of every shift of the pieces: cosines and sines `[angles, rotary_dim / 2]`, and each shift's row.

    At least one row, so that the kernels always have a table; shift 0 has none.
    """
    half = rotation.rotary_dim // 2 if rotation is not None else 0
    shifts = {piece.shift: None for piece in pieces if piece.shift}
    rows = [rotation.angles(shift) for shift in shifts] if rotation is not None else []
    cos, sin = (
        torch.stack([row[i].detach().to("cpu", torch.float32) for row in rows]) if rows else torch.zeros(1, half)
        for i in range(2)
    )
    return cos, sin, {shift: row for row, shift in enumerate(shifts)}
