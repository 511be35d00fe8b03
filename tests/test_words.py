# SPDX-License-Identifier: Apache-2.0
"""How convolutions and plans are written in tables, and tables as text and HTML."""

from dataclasses import replace

import pytest
from jax import lax

from jaxcudnn import _words
from jaxcudnn._dtypes import Dtypes
from jaxcudnn._spec import ConvSpec, Layout
from jaxcudnn._table import Column, Table

DEFAULT = lax.Precision.DEFAULT
PLAIN = ConvSpec(
    x_shape=(8, 16, 32, 30),
    w_shape=(32, 16, 3, 3),
    strides=(1, 1),
    padding=((0, 0), (0, 0)),
    dilation=(1, 1),
    groups=1,
    flip=False,
    dtypes=Dtypes("bfloat16", "bfloat16", "bfloat16"),
    precision=(DEFAULT, DEFAULT),
)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"strides": (2, 2)}, "/2"),
        ({"strides": (2, 1)}, "/2,1"),
        ({"padding": ((1, 1), (1, 1))}, "pad 1"),
        ({"padding": ((0, 1), (2, 2))}, "pad 0:1,2"),
        ({"dilation": (1, 4)}, "dil 1,4"),
        ({"groups": 4}, "groups 4"),
        ({"flip": True}, "flip"),
        (
            {"strides": (2, 2), "padding": ((1, 1), (0, 0)), "groups": 2, "flip": True},
            "/2 pad 1,0 groups 2 flip",
        ),
    ],
    ids=str,
)
def test_geometry(changes, text):
    spec = replace(PLAIN, **changes)
    assert _words.geometry(spec) == text
    parts = ["wgrad of 8x16x32x30 * 32x16x3x3", text, "bf16"]
    assert _words.convolution("wgrad", spec) == " ".join(filter(None, parts))


def test_different_dtypes_are_those_of_x_w_and_y():
    spec = replace(PLAIN, dtypes=Dtypes("bfloat16", "bfloat16", "float32"))
    assert _words.of_spec(spec).endswith(" bf16/bf16/f32")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("float32", "float32", "float32"), "f32"),
        (("bfloat16", "bfloat16", "float32"), "bf16->f32"),
        (("int8", "uint8", "int32"), "i8*u8->i32"),
        (("complex64", "float32", "complex64"), "c64*f32->c64"),
        (("float8_e4m3fn",) * 3, "f8_e4m3fn"),
        (("bool", "bool", "bool"), "bool"),
    ],
    ids=str,
)
def test_dtypes(given, text):
    assert _words.dtypes(*given) == text


@pytest.mark.parametrize(
    ("orders", "text"),
    [
        (("NHWC", "OHWI", "NHWC"), "NHWC/OHWI"),
        (("NCHW", "OIHW", "NCHW"), "NCHW/OIHW"),
        (("CWHN", "HWIO", "NHWC"), "CWHN/HWIO/NHWC"),
        (("NWC", "WIO", "NWC"), "NWC/WIO"),
        (("NCDHW", "OIDHW", "NCDHW"), "NCDHW/OIDHW"),
        (("NC", "IO", "NC"), "NC/IO"),
    ],
    ids=str,
)
def test_layout(orders, text):
    shape = (1,) * len(orders[0])
    x, w, y = lax.conv_dimension_numbers(shape, shape, orders)
    assert _words.layout_letters(Layout(tuple(x), tuple(w), tuple(y))) == text


def test_layout_of_many_dimensions():
    axes = tuple(range(6))
    assert _words.layout_letters(Layout(axes, axes, axes)) == "NC0123/OI0123"


def test_product():
    assert _words.product(((8, 3), ())) == "8x3 * ()"


def test_notes():
    notes = ["CUDNN_NUMERICAL_NOTE_TENSOR_CORE", "CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION", "NEW"]
    assert _words.notes(notes) == ["tensor core", "runtime compilation", "new"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (64 << 20, "64 MiB"),
        (5 << 40, "5120 GiB"),
    ],
)
def test_size(number, text):
    assert _words.size(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, ""), (1.234, "1.23"), (12.34, "12.3"), (99.96, "100"), (1234.5, "1234")],
)
def test_microseconds(number, text):
    assert _words.microseconds(number) == text


class TestTable:
    def make(self) -> Table:
        table = Table((Column("name", limit=5), Column("empty"), Column("n", right=True)))
        table.rows = [["a", "", "1000"], ["longer", "", "1"]]
        return table

    def test_text(self):
        assert self.make().text("end").splitlines() == [
            "name      n", "-----  ----", "a      1000", "long…     1", "end"
        ]  # fmt: skip

    def test_html(self):
        html = self.make().html("<end>")
        assert "longer" in html  # nothing is cut off
        assert "empty" not in html
        assert '<td style="text-align: right">1000</td>' in html
        assert '<td style="text-align: left">a</td>' in html
        assert html.endswith("<p>&lt;end&gt;</p>")

    def test_notes(self):
        table = self.make()
        assert [table.note(text) for text in ("one", "two<", "one")] == ["[1]", "[2]", "[1]"]
        assert table.text("end").endswith("end\n[1] one\n[2] two<")
        assert table.html("end").endswith("<ol><li>one</li><li>two&lt;</li></ol>")

    def test_without_rows(self):
        assert Table((Column("name"),)).text("end") == "end"
