"""Page layouts: strides are found where there are any."""

import pytest
import torch

from agentcache.kernels import PageLayout, Strides
from tests.kernels.cases import make_layout


@pytest.mark.parametrize("kind", ["cpu", "rows", "split"])
def test_strides_are_found(kind):
    layout = make_layout(kind, heads=2, block=16, dim=32, num_pages=4)
    probed = PageLayout.from_cells(layout.page_stride, layout.k_cells, layout.v_cells)
    assert probed.k_strides == layout.k_strides
    assert probed.v_strides == layout.v_strides
    assert probed.k_strides is not None
    assert probed.shape == (2, 16, 32)


def test_packed_pages_have_no_strides():
    layout = make_layout("amx", heads=2, block=32, dim=64, num_pages=4)
    assert layout.k_strides is None
    assert layout.v_strides is None
    assert layout.extent == 2 * 2 * 32 * 64


def test_refuses_cells_that_share_a_place():
    cells = torch.arange(8).view(1, 2, 4)
    with pytest.raises(ValueError, match="permutation"):
        PageLayout.from_cells(16, cells, cells)


def test_refuses_shapes_that_differ():
    with pytest.raises(ValueError, match="one shape"):
        PageLayout.from_cells(16, torch.arange(8).view(1, 2, 4), torch.arange(8, 16).view(2, 1, 4))


def test_refuses_a_cell_before_its_page():
    with pytest.raises(ValueError, match="before its page"):
        PageLayout.from_cells(16, torch.arange(-1, 7).view(1, 2, 4), torch.arange(8, 16).view(1, 2, 4))


def test_a_single_head_has_strides():
    layout = PageLayout.from_strides((1, 2, 4), 16, Strides(0, 0, 4, 1), Strides(8, 0, 4, 1))
    assert layout.k_strides == Strides(0, 0, 4, 1)
