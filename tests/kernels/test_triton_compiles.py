"""Every variant that the dispatcher can choose compiles ahead of time, with no GPU, and none spills on sm_90."""

import re
import subprocess
from pathlib import Path

import pytest

from agentcache.kernels import PackedFormat, Tag

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from agentcache.kernels import triton_backend as backend  # noqa: E402

DIMS = (64, 80, 96, 128, 256)
STRIDES, TABLES = (False, False), (True, True)
POINTERS = {
    "*i64": ("tiles", "pages", "table", "k_cells", "v_cells", "cells", "limits"),
    "*fp32": ("cos", "sin", "tops", "sums", "out"),
}
KERNELS = {
    "scatter": backend.scatter_kernel,
    "gather": backend.gather_kernel,
    "statistics": backend.statistics_kernel,
    "mass": backend.mass_kernel,
    "residual": backend.residual_kernel,
}


def constants_of(kernel, dim, tag, tables, element, rotary="halves"):
    """Returns the compile-time arguments that the dispatcher would pass."""
    size = 4 if element is tl.float32 else 2
    if kernel == "scatter":
        rotary_dim = {"none": 0, "partial": dim // 2}.get(rotary, dim)
        interleaved = rotary == "pairs"
        return backend.scatter_constants(tag, dim, rotary_dim, interleaved=interleaved, tables=tables, element=element)
    if kernel == "gather":
        return backend.gather_constants(PackedFormat(tag, 28, 2, dim, size), tables, element)
    if kernel == "residual":
        return backend.residual_constants(dim, tables[1], element)
    return backend.mass_constants(dim, tables[0], element)


def compiled(kernel, capability, tables, constants, element):
    """Returns a cubin's compilation, its arguments typed as a launch types them."""
    function = KERNELS[kernel]
    types = {name: kind for kind, names in POINTERS.items() for name in names}
    pointer = {tl.bfloat16: "*bf16", tl.float16: "*fp16", tl.float32: "*fp32"}[element]
    types |= {"page": pointer, "queries": pointer, "scale": "fp32"}
    # Rows of dimensions are contiguous in every affine GPU layout, and a launch makes a constant of a stride of 1.
    constants = constants | (
        {} if any(tables) else {name: 1 for name in ("k_dim", "v_dim", "dim") if name in function.arg_names}
    )
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    options = backend.kernel_options(function, tables)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def usage(binary, folder):
    """Returns registers, stack and local bytes of a cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    path = folder / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    text = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", text)
    return tuple(map(int, found.groups()))


def check(kernel, capability, dim, tag, tables, element, folder, rotary="halves"):
    binary = compiled(kernel, capability, tables, constants_of(kernel, dim, tag, tables, element, rotary), element)
    assert len(binary.asm["cubin"]) > 0
    if capability == 90:
        registers, stack, local = usage(binary, folder)
        assert 0 < registers <= 255
        assert stack == local == 0, f"spills {stack} bytes of stack, {local} local, with {registers} registers"


@pytest.mark.parametrize("tables", [STRIDES, TABLES], ids=["strides", "table"])
@pytest.mark.parametrize("tag", Tag)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kernel", ["scatter", "gather"])
def test_moving_kernels_do_not_spill(tmp_path, kernel, dim, tag, tables):
    check(kernel, 90, dim, tag, tables, tl.bfloat16, tmp_path)


@pytest.mark.parametrize("rotary", ["none", "partial", "pairs"])
@pytest.mark.parametrize("tag", Tag)
def test_every_rotary_form_does_not_spill(tmp_path, tag, rotary):
    check("scatter", 90, 128, tag, STRIDES, tl.bfloat16, tmp_path, rotary)


@pytest.mark.parametrize("element", [tl.bfloat16, tl.float32], ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kernel", ["statistics", "mass", "residual"])
def test_reading_kernels_do_not_spill(tmp_path, kernel, dim, element):
    check(kernel, 90, dim, Tag.K8V4, STRIDES, element, tmp_path)


@pytest.mark.parametrize("capability", [80, 100])
@pytest.mark.parametrize("kernel", KERNELS)
def test_older_and_newer_chips(tmp_path, kernel, capability):
    for tag in Tag if kernel in ("scatter", "gather") else (Tag.K8V4,):
        check(kernel, capability, 128, tag, STRIDES, tl.bfloat16, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("element", [tl.bfloat16, tl.float16, tl.float32], ids=str)
@pytest.mark.parametrize("dim", [32, *DIMS, 112, 160, 192])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_variant(tmp_path, kernel, dim, element, capability):
    moving = kernel in ("scatter", "gather")
    for tables in (STRIDES, TABLES):
        for tag in Tag if moving else (Tag.K8V4,):
            for rotary in ("none", "halves", "partial", "pairs") if kernel == "scatter" else ("none",):
                check(kernel, capability, dim, tag, tables, element, tmp_path, rotary)
