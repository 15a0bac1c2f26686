"""The steps of `attention_mass` on CPU, on float32 rows of whole lines of 32 keys; see `cpu_simd`."""

# ruff: noqa: ARG001 - numba fixes the signatures

from __future__ import annotations

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from agentcache.kernels.cpu_simd import step
from agentcache.kernels.cpu_vector import F32, I32, Vector

__all__ = ["add_scaled_row", "dot_lines8", "row_exp2_sum", "row_max"]

# Keys a dot product holds at once: the sums of 8 queries must fit the vector registers, 32 of them or 16.
_DOT_LANES = 32 if binding.get_host_cpu_features().get("avx512f") else 8

_A, _F = types.int64, types.float32  # an address or a count, a float32


@intrinsic
def dot_lines8(typing, queries, dim, keys, pitch, out, out_pitch, like):
    """Writes the dot products of 8 float32 queries (rows of `dim`) with 32 keys that stand dimension by dimension."""

    def emit(at, queries, dim, keys, pitch, out, out_pitch, _):
        v = Vector(at, _DOT_LANES, like)
        four = ir.Constant(dim.type, 4)
        starts = [at.add(queries, at.mul(at.mul(dim, ir.Constant(dim.type, r)), four)) for r in range(8)]
        sums = [cgutils.alloca_once(at, v.of(F32)) for _ in starts]
        for part in range(32 // _DOT_LANES):
            first = ir.Constant(keys.type, part * _DOT_LANES)
            lines = at.add(keys, at.mul(first, ir.Constant(keys.type, like.dtype.bitwidth // 8)))
            for slot in sums:
                at.store(v.real(0.0), slot)
            with cgutils.for_range(at, dim) as loop:
                key, along = v.floats(at.add(lines, at.mul(loop.index, pitch))), at.mul(loop.index, four)
                for start, slot in zip(starts, sums, strict=True):
                    query = v.splat(at.load(at.inttoptr(at.add(start, along), F32.as_pointer())))
                    at.store(v.fused(query, key, at.load(slot)), slot)
            for r, slot in enumerate(sums):
                row = at.add(out, at.mul(out_pitch, ir.Constant(out_pitch.type, r)))
                v.store(at.load(slot), at.add(row, at.mul(first, four)))

    return step(emit, types.void(_A, _A, _A, _A, _A, _A, like))


@intrinsic
def row_max(typing, address, lines, like):
    """Returns the largest of `lines * 32` float32."""

    def emit(at, address, lines, _):
        v = Vector(at, 32, like)
        slot = cgutils.alloca_once(at, v.of(I32))
        at.store(v.ints(-(2**31)), slot)
        with cgutils.for_range(at, lines) as loop:
            number = v.ordered(v.load(at.add(address, at.mul(loop.index, ir.Constant(lines.type, 128))), F32))
            at.store(v.call("llvm.smax.v32i32", number.type, at.load(slot), number), slot)
        number = v.largest(at.load(slot))
        sign = at.ashr(number, ir.Constant(I32, 31))
        return at.bitcast(at.xor(number, at.and_(sign, ir.Constant(I32, 0x7FFFFFFF))), F32)

    return step(emit, _F(_A, _A, like))


@intrinsic
def row_exp2_sum(typing, address, lines, top, like):
    """Replaces `lines * 32` float32 by `2 ** (x - top)` and returns their sum."""

    def emit(at, address, lines, top, _):
        v = Vector(at, 32, like)
        slot = cgutils.alloca_once(at, v.of(F32))
        at.store(v.real(0.0), slot)
        high = v.splat(top)
        with cgutils.for_range(at, lines) as loop:
            place = at.add(address, at.mul(loop.index, ir.Constant(lines.type, 128)))
            powers = v.power_of_two(at.fsub(v.load(place, F32), high))
            v.store(powers, place)
            at.store(at.fadd(at.load(slot), powers), slot)
        return v.total(at.load(slot))

    return step(emit, _F(_A, _A, _F, like))


@intrinsic
def add_scaled_row(typing, out, address, lines, factor, like):
    """Adds `lines * 32` float32 times a factor to as many."""

    def emit(at, out, address, lines, factor, _):
        v = Vector(at, 32, like)
        scale = v.splat(factor)
        with cgutils.for_range(at, lines) as loop:
            along = at.mul(loop.index, ir.Constant(lines.type, 128))
            to = at.add(out, along)
            v.store(v.fused(v.load(at.add(address, along), F32), scale, v.load(to, F32)), to)

    return step(emit, types.void(_A, _A, _A, _F, like))
