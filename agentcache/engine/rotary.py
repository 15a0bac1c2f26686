"""Moving keys to another position: `K' = R(new - old) K` (PatchKV, phase correction), proved on the model's own module.

Rotations about the same planes add up, so a key that was embedded at position p becomes the key at p + d by one more
rotation by d. Cosines and sines come from the module's own table, at unit magnitude: a YaRN module multiplies an attention
factor into its table, which the stored key already carries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentcache.errors import SelfCheckError

__all__ = ["KeyRotation", "build_rotation"]


@dataclass(frozen=True)
class KeyRotation:
    """Rotates keys by a number of positions.

    Attributes:
        inv_freq: Angle per position of each plane, float64 `[rotary_dim / 2]`.
        rotary_dim: Leading dimensions that are rotated; the rest passes through.
        interleaved: Planes are (0, 1), (2, 3) ... instead of (i, i + rotary_dim / 2).
    """

    inv_freq: torch.Tensor
    rotary_dim: int
    interleaved: bool

    def angles(self, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosine and sine of `shift` positions, float32 `[rotary_dim / 2]`."""
        angle = self.inv_freq * shift
        return angle.cos().float(), angle.sin().float()

    def rotate(self, key: torch.Tensor, shift: int) -> torch.Tensor:
        """Returns keys `[..., D]` turned by `shift` positions, computed in float32, in the key's dtype."""
        if shift == 0:
            return key
        cos, sin = (x.to(key.device) for x in self.angles(shift))
        head, rest = key[..., : self.rotary_dim].float(), key[..., self.rotary_dim :]
        if self.interleaved:
            a, b = head[..., 0::2], head[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            half = self.rotary_dim // 2
            a, b = head[..., :half], head[..., half:]
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        turned = turned.to(key.dtype)
        return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


def _inverse_frequencies(module: torch.nn.Module) -> torch.Tensor:
    """Returns the angle per position of each plane, float64, as the module's table has it.

    The table is rebuilt in float32 by the module itself (its buffer may be bfloat16); its first steps give the angles.
    """
    table = module._compute_cos_sin_cache().double()
    half = table.shape[-1] // 2
    cos, sin = table[:, :half], table[:, half:]
    magnitude = (cos[0] ** 2 + sin[0] ** 2).sqrt()
    if not bool((magnitude > 0).all()):
        raise SelfCheckError(f"{type(module).__name__} has planes of no magnitude at position 0")
    one = torch.atan2(sin[1], cos[1])
    # One step is known to about 1e-7; the longest step whose turn count the shorter ones fix is known far better.
    angle, step = one, 1
    while step * 2 < len(table):
        step *= 2
        raw = torch.atan2(sin[step], cos[step])
        turns = ((angle * step - raw) / (2 * torch.pi)).round()
        angle = (raw + turns * 2 * torch.pi) / step
    expected = torch.atan2(sin[-1], cos[-1])
    error = torch.remainder(angle * (len(table) - 1) - expected + torch.pi, 2 * torch.pi) - torch.pi
    if float(error.abs().max()) > 5e-2:  # float32 angles are good to 1e-2 at 128k positions
        raise SelfCheckError(
            f"the angles of {type(module).__name__} are not proportional to the position (off by {float(error.abs().max()):.3f} rad)"
        )
    return angle


def build_rotation(module: torch.nn.Module, head_dim: int, dtype: torch.dtype, *, positions: int = 4096) -> KeyRotation:
    """Returns the rotation of a model's rotary module after proving `rotate(rotate(k, p), d) == rotate(k, p + d)` on it.

    Args:
        module: vLLM's rotary embedding.
        head_dim: D.
        dtype: The model's dtype; the proof runs in it, with the tolerance that its rounding needs.
        positions: Highest position of the proof.

    Raises:
        SelfCheckError: The identity does not hold, so keys of this model cannot be moved.
    """
    rotation = KeyRotation(_inverse_frequencies(module), int(module.rotary_dim), not module.is_neox_style)
    device = module.cos_sin_cache.device
    top = min(positions, module.cos_sin_cache.shape[0] - 1)
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(1, head_dim, generator=generator).to(dtype).to(device)

    def embedded(position: int) -> torch.Tensor:
        at = torch.tensor([position], device=device)
        _, out = module(at, key.clone(), key.clone())
        return out.view(1, head_dim)

    tolerance = 3e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-4
    scale = float(embedded(0).float().abs().max())
    for start, stop in ((0, 1), (3, 2), (7, top), (top, 5), (top // 2, top // 3), (top // 3, top)):
        moved = rotation.rotate(embedded(start), stop - start).float()
        error = float((moved - embedded(stop).float()).abs().max()) / scale
        if error > tolerance:
            raise SelfCheckError(
                f"{type(module).__name__}: a key moved from {start} to {stop} is off by {error:.2e} (allowed {tolerance:.0e}); "
                "keys of this model cannot be moved"
            )
    return rotation
