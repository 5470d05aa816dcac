"""Pictures of layouts: as text, word for word, and as SVG."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
import torch

import shardlib as sl
from shardlib import Mesh, P, ShardingError, shard
from shardlib.sharding.layout import Layout
from shardlib.tensor.visualize import Picture

MESH = Mesh(data=2, tensor=2)

PICTURES = {
    "cut along both dims": (
        ((4, 6), "b@data f@tensor"),
        """
f32[4@data, 6@tensor] on Mesh(data=2, tensor=2)
     0:3 3:6
    ┌───┬───┐
0:2 │ 0 │ 1 │
    ├───┼───┤
2:4 │ 2 │ 3 │
    └───┴───┘""",
    ),
    "replicas": (
        ((5, 3), "b@data _"),
        """
f32[5@data, 3] on Mesh(data=2, tensor=2)
      0:3
    ┌─────┐
0:3 │ 0,1 │
    ├─────┤
3:5 │ 2,3 │
    └─────┘""",
    ),
    "uneven and empty": (
        ((3,), "b@(data tensor)"),
        """
f32[3@(data tensor)] on Mesh(data=2, tensor=2)
 0:1 1:2 2:3
┌───┬───┬───┐
│ 0 │ 1 │ 2 │
└───┴───┴───┘
nothing on 3""",
    ),
    "a factor inside a dim": (
        ((6, 2), "(three=3 b@tensor) _"),
        """
f32[(3 2@tensor), 2] on Mesh(data=2, tensor=2)
      0:2
    ┌─────┐
0:1 │ 0,2 │
    ├─────┤
1:2 │ 1,3 │
    ├─────┤
2:3 │ 0,2 │
    ├─────┤
3:4 │ 1,3 │
    ├─────┤
4:5 │ 0,2 │
    ├─────┤
5:6 │ 1,3 │
    └─────┘""",
    ),
    "three dims": (
        ((2, 3, 4), "a@data b c@tensor"),
        """
f32[2@data, 3, 4@tensor] on Mesh(data=2, tensor=2)
[0:1, :, :]
     0:2 2:4
    ┌───┬───┐
0:3 │ 0 │ 1 │
    └───┴───┘
[1:2, :, :]
     0:2 2:4
    ┌───┬───┐
0:3 │ 2 │ 3 │
    └───┴───┘""",
    ),
    "one element": (
        ((), P()),
        """
f32[] on Mesh(data=2, tensor=2)
┌─────┐
│ 0-3 │
└─────┘""",
    ),
    "no element": (((0, 3), P()), "\nf32[0, 3] on Mesh(data=2, tensor=2)\nno elements"),
    "a dim in many pieces": (
        ((80,), "(a=40 b@data)"),
        """
f32[(40 2@data)] on Mesh(data=2, tensor=2)
  0:1   1:2   2:3   3:4   4:5   5:6   6:7   ...
┌─────┬─────┬─────┬─────┬─────┬─────┬─────┬─────┐
│ 0,1 │ 2,3 │ 0,1 │ 2,3 │ 0,1 │ 2,3 │ 0,1 │ ... │
└─────┴─────┴─────┴─────┴─────┴─────┴─────┴─────┘""",
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_text(name: str) -> None:
    (shape, spec), text = PICTURES[name]
    with MESH:
        picture = sl.visualize(shard(torch.zeros(shape), spec))
    assert str(picture) == repr(picture) == text[1:]


@pytest.mark.parametrize("name", PICTURES)
def test_svg(name: str) -> None:
    """Each block is a rectangle, and its ranks are written in it."""
    (shape, spec), _ = PICTURES[name]
    with MESH:
        picture = sl.visualize(shard(torch.zeros(shape), spec))
    svg = ET.fromstring(picture._repr_svg_())
    texts = [x.text for x in svg.iter("{http://www.w3.org/2000/svg}text")]
    rectangles = list(svg.iter("{http://www.w3.org/2000/svg}rect"))
    assert all(ranks in texts for ranks in picture.ranks.values())
    assert len(rectangles) >= len(picture.ranks)
    width = int(svg.attrib["width"])
    assert all(int(r.attrib["x"]) + int(r.attrib["width"]) <= width for r in rectangles)
    assert picture.title in picture._repr_html_()


def test_pending_sums() -> None:
    assert "0+1" in str(sl.visualize(Layout.parse("4@data, 2 +tensor", MESH.axes), MESH))
    assert "0+2, 1+3" in str(sl.visualize(Layout.parse("4 +data", MESH.axes), MESH))
    assert "0 max 1" in str(sl.visualize(Layout.parse("4@data max+tensor", MESH.axes), MESH))


def test_any_mesh() -> None:
    """Every device's piece is where `Layout.local_shape` says, on meshes of one to four axes."""
    for text, axes in [
        ("7@(a b), 3@c", {"a": 2, "b": 3, "c": 2}),
        ("(2 5@b), 4@(c d)", {"a": 2, "b": 2, "c": 2, "d": 2}),
        ("6@a:(2)2", {"a": 4}),
    ]:
        mesh = Mesh.abstract(axes)
        layout = Layout.parse(text, axes)
        picture = sl.visualize(layout, mesh)
        for rank, coords in enumerate(mesh.all_coords()):
            held = sum(_size(picture, block) for block, ranks in picture.ranks.items() if rank in _members(ranks))
            assert held == torch.Size(layout.local_shape(coords)).numel(), (text, rank)


def _size(picture: Picture, block: tuple[int, ...]) -> int:
    spans = [picture.stretches[d][i] for d, i in enumerate(block)]
    return torch.Size([stop - start for start, stop in spans]).numel()


def _members(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def test_plain_tensors_are_everywhere() -> None:
    with MESH:
        assert "0-3" in str(sl.visualize(torch.zeros(3)))
    with pytest.raises(ShardingError, match=r"is outside any mesh.*\n.*\n.*visualize\(layout, mesh\)"):
        sl.visualize(torch.zeros(3))
