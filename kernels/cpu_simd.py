"""The steps of the CPU kernels that numba has no words for, on raw addresses.

Left to a vectoriser these loops run one element at a time as soon as it cannot prove two arrays apart, and numba widens
integers to 64 bits, which halves the lanes. As explicit vectors they compile to what the machine has (AVX2, AVX-512, NEON).

The last argument `like` of a step is an array whose element type names the KV dtype (see `cpu_vector`). A number at a name's
end is the number of elements. All arithmetic is float32, one rounding an operation, as in `reference.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from agentcache.kernels.cpu_vector import F32, I8, I16, I32, LINE_BYTES, Vector

TINY = 2.0**-100  # a scale below this stands for zero, so that its reciprocal stays finite

_A, _F, _I = types.int64, types.float32, types.int32  # an address, a float32, an int32


def step(emit: Callable[..., Any], signature: Any) -> tuple[Any, Callable[..., Any]]:
    """Returns what an intrinsic returns: its signature, and code from `emit(builder, *arguments)`."""

    def generate(context: Any, builder: ir.IRBuilder, typed: Any, args: Any) -> Any:
        result = emit(builder, *args)
        return context.get_dummy_value() if signature.return_type == types.void else result

    return signature, generate


@intrinsic
def copy(typing, dst, src, size):
    """Copies `size` bytes."""

    def emit(at, dst, src, size):
        pointers = (at.inttoptr(x, cgutils.voidptr_t) for x in (dst, src))
        cgutils.raw_memcpy(at, *pointers, size, 1)

    return step(emit, types.void(_A, _A, _A))


@intrinsic
def copy_element(typing, dst, src, like):
    """Copies one element of the KV dtype."""

    def emit(at, dst, src, _):
        pointer = (I32 if like.dtype == types.float32 else I16).as_pointer()
        at.store(at.load(at.inttoptr(src, pointer), align=1), at.inttoptr(dst, pointer), align=1)

    return step(emit, types.void(_A, _A, like))


@intrinsic
def copy64(typing, dst, src):
    """Copies 64 bytes."""

    def emit(at, dst, src):
        v = Vector(at, LINE_BYTES // 4, types.float32[:])
        v.store(v.load(src, I32), dst)

    return step(emit, types.void(_A, _A))


@intrinsic
def stream64(typing, dst, src):
    """Copies 64 bytes past the caches to a line that is aligned to 64: the line is not read first, which halves the traffic."""

    def emit(at, dst, src):
        v = Vector(at, LINE_BYTES // 4, types.float32[:])
        v.stream(v.load(src, I32), dst)

    return step(emit, types.void(_A, _A))


@intrinsic
def prefetch(typing, address):
    """Asks for the line at an address, which need not be valid."""

    def emit(at, address):
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, I32, I32, I32])
        function = cgutils.get_or_insert_function(at.module, kind, "llvm.prefetch.p0")
        at.call(function, [at.inttoptr(address, cgutils.voidptr_t), *(ir.Constant(I32, x) for x in (0, 3, 1))])

    return step(emit, types.void(_A))


@intrinsic
def fence(typing):
    """Orders streamed lines before what follows, for other threads."""
    return step(lambda at: at.fence("seq_cst"), types.void())


@intrinsic
def load_u16(typing, address):
    """Returns the 16-bit word at an address."""
    return step(lambda at, a: at.zext(at.load(at.inttoptr(a, I16.as_pointer()), align=1), I32), _I(_A))


@intrinsic
def store_u16(typing, word, address):
    """Writes the lower 16 bits of a word."""

    def emit(at, word, address):
        at.store(at.trunc(word, I16), at.inttoptr(address, I16.as_pointer()), align=1)

    return step(emit, types.void(_I, _A))


@intrinsic
def float_of(typing, bits, shift):
    """Returns the float32 with the bits `bits << shift`: a scale whose lower mantissa bits were dropped."""
    return step(lambda at, bits, shift: at.bitcast(at.shl(bits, shift), F32), _F(_I, _I))


@intrinsic
def scale_bits(typing, value, drop):
    """Returns the upper bits of a non-negative float32, rounded up after dropping `drop` mantissa bits; 0 below `TINY`."""

    def emit(at, value, drop):
        ones = at.sub(at.shl(ir.Constant(I32, 1), drop), ir.Constant(I32, 1))
        bits = at.lshr(at.add(at.bitcast(value, I32), ones), drop)
        return at.select(at.fcmp_ordered("<", value, ir.Constant(F32, TINY)), ir.Constant(I32, 0), bits)

    return step(emit, _I(_F, _I))


@intrinsic
def from_ordered(typing, number):
    """Returns the float32 that an ordered int32 stands for."""

    def emit(at, number):
        sign = at.ashr(number, ir.Constant(I32, 31))
        return at.bitcast(at.xor(number, at.and_(sign, ir.Constant(I32, 0x7FFFFFFF))), F32)

    return step(emit, _F(_I))


# A destination line of 32 tokens is cut from two source rows: lanes below `cut` from the first address, the others from the
# second. Both loads take 32 elements; what lies outside the cut is read and dropped.


def _merge_elements(stream: bool) -> Any:
    @intrinsic
    def merge_elements(typing, first, second, cut, out, like):
        """Copies a line, bit for bit."""

        def emit(at, first, second, cut, out, _):
            v = Vector(at, 32, like)
            (v.stream if stream else v.store)(v.merged(v.elements(first), v.elements(second), cut), out)

        return step(emit, types.void(_A, _A, _I, _A, like))

    return merge_elements


def _turn_elements(stream: bool) -> Any:
    @intrinsic
    def turn_elements(typing, a1, a2, b1, b2, cut, cos, sin, out_a, out_b, like):
        """Turns a plane of a line: (a cos - b sin, b cos + a sin)."""

        def emit(at, a1, a2, b1, b2, cut, cos, sin, out_a, out_b, _):
            v = Vector(at, 32, like)
            a, b = (v.widened(v.merged(v.elements(x), v.elements(y), cut)) for x, y in ((a1, a2), (b1, b2)))
            x, y = v.turned(a, b, cos, sin)
            v.put(x, out_a, stream=stream)
            v.put(y, out_b, stream=stream)

        return step(emit, types.void(_A, _A, _A, _A, _I, _F, _F, _A, _A, like))

    return turn_elements


def _merged_codes(v: Vector, first: ir.Value, second: ir.Value, cut: ir.Value, s1: ir.Value, s2: ir.Value) -> ir.Value:
    codes = v.merged(v.load(first, I8), v.load(second, I8), cut)
    return v.at.fmul(v.numbers(codes), v.merged(v.splat(s1), v.splat(s2), cut))


def _scale_line(stream: bool) -> Any:
    @intrinsic
    def scale_line(typing, first, second, cut, scale1, scale2, out, like):
        """Dequantises a line; each source row has its scale."""

        def emit(at, first, second, cut, scale1, scale2, out, _):
            v = Vector(at, 32, like)
            v.put(_merged_codes(v, first, second, cut, scale1, scale2), out, stream=stream)

        return step(emit, types.void(_A, _A, _I, _F, _F, _A, like))

    return scale_line


def _turn_codes(stream: bool) -> Any:
    @intrinsic
    def turn_codes(typing, a1, a2, b1, b2, cut, scale_a1, scale_a2, scale_b1, scale_b2, cos, sin, out_a, out_b, like):
        """Dequantises and turns a plane of a line."""

        def emit(at, a1, a2, b1, b2, cut, scale_a1, scale_a2, scale_b1, scale_b2, cos, sin, out_a, out_b, _):
            v = Vector(at, 32, like)
            a = _merged_codes(v, a1, a2, cut, scale_a1, scale_a2)
            b = _merged_codes(v, b1, b2, cut, scale_b1, scale_b2)
            x, y = v.turned(a, b, cos, sin)
            v.put(x, out_a, stream=stream)
            v.put(y, out_b, stream=stream)

        return step(emit, types.void(_A, _A, _A, _A, _I, _F, _F, _F, _F, _F, _F, _A, _A, like))

    return turn_codes


def _scale_codes(lanes: int, stream: bool = False) -> Any:
    @intrinsic
    def scale_codes(typing, codes, scale, out, like):
        """Dequantises int8 codes of one scale."""

        def emit(at, codes, scale, out, _):
            v = Vector(at, lanes, like)
            v.put(v.scaled(v.numbers(v.load(codes, I8)), scale), out, stream=stream)

        return step(emit, types.void(_A, _F, _A, like))

    return scale_codes


def _scale_nibbles(lanes: int, stream: bool = False) -> Any:
    @intrinsic
    def scale_nibbles(typing, codes, shift, zero, scale, out, like):
        """Dequantises the lower (shift 0) or upper (shift 4) nibbles of bytes: `(nibble - zero) * scale`."""

        def emit(at, codes, shift, zero, scale, out, _):
            v = Vector(at, lanes, like)
            wide = at.lshr(at.zext(v.load(codes, I8), v.of(I32)), v.splat(shift))
            code = at.sub(at.and_(wide, v.ints(15)), v.splat(zero))
            v.put(v.scaled(at.sitofp(code, v.of(F32)), scale), out, stream=stream)

        return step(emit, types.void(_A, _I, _I, _F, _A, like))

    return scale_nibbles


def _absmax(lanes: int) -> Any:
    @intrinsic
    def absmax(typing, address, like):
        """Returns the largest magnitude as the bits of a float32; bits of magnitudes sort as they do, NaN highest."""

        def emit(at, address, _):
            v = Vector(at, lanes, like)
            return v.largest(at.and_(at.bitcast(v.floats(address), v.of(I32)), v.ints(0x7FFFFFFF)))

        return step(emit, _I(_A, like))

    return absmax


def _extreme(lanes: int, smallest: bool) -> Any:
    @intrinsic
    def extreme(typing, address, like):
        """Returns the largest or smallest element as an ordered int32."""

        def emit(at, address, _):
            v = Vector(at, lanes, like)
            return v.largest(v.ordered(v.floats(address)), smallest=smallest)

        return step(emit, _I(_A, like))

    return extreme


def _quantise(lanes: int) -> Any:
    @intrinsic
    def quantise(typing, address, inverse, out, like):
        """Writes int8 codes: elements times the inverse scale, rounded, in [-127, 127]."""

        def emit(at, address, inverse, out, _):
            v = Vector(at, lanes, like)
            codes = v.clamped(v.rounded(v.scaled(v.floats(address), inverse)), -127.0, 127.0)
            v.store(at.trunc(codes, v.of(I8)), out)

        return step(emit, types.void(_A, _F, _A, like))

    return quantise


def _uint4(v: Vector, address: ir.Value, inverse: ir.Value, zero: ir.Value) -> ir.Value:
    code = v.at.fadd(v.rounded(v.scaled(v.floats(address), inverse)), v.splat(zero))
    return v.clamped(code, 0.0, 15.0)


def _quantise_nibbles(lanes: int) -> Any:
    @intrinsic
    def quantise_nibbles(typing, low, low_inverse, low_zero, high, high_inverse, high_zero, out, like):
        """Writes bytes of two 4-bit codes, each `round(element * inverse) + zero` in [0, 15]."""

        def emit(at, low, low_inverse, low_zero, high, high_inverse, high_zero, out, _):
            v = Vector(at, lanes, like)
            upper = at.shl(_uint4(v, high, high_inverse, high_zero), v.ints(4))
            v.store(at.trunc(at.or_(_uint4(v, low, low_inverse, low_zero), upper), v.of(I8)), out)

        return step(emit, types.void(_A, _F, _F, _A, _F, _F, _A, like))

    return quantise_nibbles


def _nibble_error(lanes: int) -> Any:
    @intrinsic
    def nibble_error(typing, address, inverse, zero, scale, like):
        """Returns the squared error that 4-bit codes leave in elements."""

        def emit(at, address, inverse, zero, scale, _):
            v = Vector(at, lanes, like)
            code = at.sitofp(_uint4(v, address, inverse, zero), v.of(F32))
            error = at.fsub(v.floats(address), v.scaled(at.fsub(code, v.splat(zero)), scale))
            return v.total(at.fmul(error, error))

        return step(emit, _F(_A, _F, _F, _F, like))

    return nibble_error


def _squares(lanes: int) -> Any:
    @intrinsic
    def squares(typing, address, like):
        """Returns the sum of the squares of elements."""

        def emit(at, address, _):
            v = Vector(at, lanes, like)
            x = v.floats(address)
            return v.total(at.fmul(x, x))

        return step(emit, _F(_A, like))

    return squares


merge_elements, stream_merged_elements = _merge_elements(False), _merge_elements(True)
turn_elements, stream_turned_elements = _turn_elements(False), _turn_elements(True)
scale_line, stream_scaled_line = _scale_line(False), _scale_line(True)
turn_codes, stream_turned_codes = _turn_codes(False), _turn_codes(True)
stream_codes32, scale_codes16, scale_codes8 = _scale_codes(32, True), _scale_codes(16), _scale_codes(8)
stream_nibbles32, scale_nibbles16, scale_nibbles8 = _scale_nibbles(32, True), _scale_nibbles(16), _scale_nibbles(8)
absmax32, absmax8 = _absmax(32), _absmax(8)
highest32, highest8 = _extreme(32, False), _extreme(8, False)
lowest32, lowest8 = _extreme(32, True), _extreme(8, True)
quantise32, quantise8 = _quantise(32), _quantise(8)
quantise_nibbles32, quantise_nibbles8 = _quantise_nibbles(32), _quantise_nibbles(8)
nibble_error32, nibble_error8 = _nibble_error(32), _nibble_error(8)
squares32, squares8 = _squares(32), _squares(8)
