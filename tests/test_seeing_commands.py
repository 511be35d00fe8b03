# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxcudnn explain` and `tune`: what they trace, print and return."""

import argparse
import sys

import jax
import numpy as np
import pytest

from jaxcudnn import _command_explain, _command_target, _command_tune, _load
from jaxcudnn._command_target import parse_shapes
from plan_stand_ins import Plan, StandIn

pytestmark = pytest.mark.usefixtures("measuring")

MODULE = """
import functools
import jax, jaxcudnn

def conv(x, w):
    return jaxcudnn.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "OHWI", "NHWC")
    )

def training():
    def loss(x, w):
        return (conv(x, w) ** 2).sum()
    return jax.grad(loss), (jax.ShapeDtypeStruct((2, 8, 8, 4), "float32"),) * 2

class Net:
    @staticmethod
    def call(x, w):
        return conv(x, w)

def one():
    return 1

def three():
    return conv, (), None

def not_a_function():
    return "conv", ()

def not_arguments():
    return conv, 5

number = 5
"""
SHAPES = "f32[2,8,8,4],f32[4,3,3,4]"


@pytest.fixture(autouse=True)
def module(monkeypatch, tmp_path):
    (tmp_path / "seen.py").write_text(MODULE)
    (tmp_path / "needs.py").write_text("import a_module_that_there_is_not\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("seen", "needs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path / "seen.py"
    sys.modules.pop("seen", None)


@pytest.fixture(name="no_gpu")
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(_load, "local_device", lambda: None)


@pytest.fixture(name="gpu")
def with_a_gpu(monkeypatch):
    return StandIn().install(monkeypatch)


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="jaxcudnn")
    subparsers = parser.add_subparsers(required=True)
    _command_explain.add(subparsers)
    _command_tune.add(subparsers)
    args = parser.parse_args(arguments)
    return args.run(args)


class TestExplain:
    def test_shapes(self, no_gpu, capsys, module):
        assert run("explain", "seen:conv", "--shapes", SHAPES) == 0
        out, err = capsys.readouterr()
        line = MODULE.splitlines().index("    return jaxcudnn.conv_general_dilated(") + 1
        assert out.splitlines()[2].split()[:4] == ["1", "fwd", "fprop", f"seen.py:{line}"]
        assert "2x8x8x4 * 4x3x3x4 pad 1" in out
        assert err == ""

    def test_a_function_that_makes_the_arguments(self, no_gpu, capsys):
        assert run("explain", "seen:training") == 0
        assert "2 convolutions, 2 by cuDNN" in capsys.readouterr().out

    def test_a_name_in_a_class(self, no_gpu, capsys):
        assert run("explain", "seen:Net.call", "--shapes", SHAPES) == 0
        assert "1 convolution, 1 by cuDNN" in capsys.readouterr().out

    @pytest.mark.parametrize("measure", [False, True])
    def test_measure(self, gpu, capsys, measure):
        assert run("explain", "seen:conv", "--shapes", SHAPES, *["--measure"] * measure) == 0
        assert ("20 us in all" in capsys.readouterr().out) is measure
        assert len(gpu.measured) == measure

    def test_measure_without_a_gpu(self, no_gpu, capsys):
        assert run("explain", "seen:conv", "--shapes", SHAPES, "--measure") == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("jaxcudnn explain --measure: plans must be listed and measured")


class TestTune:
    def test_measures_and_prints(self, gpu, capsys):
        assert run("tune", "seen:training") == 0
        out, err = capsys.readouterr()
        assert "2 measured in " in out
        assert err.startswith("jaxcudnn.tune 1/2: ")
        assert len(gpu.measured) == 2

    def test_quiet(self, gpu, capsys):
        gpu.plans["fprop"] = Plan()
        assert run("tune", "seen:conv", "--shapes", SHAPES, "--quiet") == 0
        out, err = capsys.readouterr()
        assert "1 known before" in out
        assert err == ""

    def test_failures_are_in_the_status(self, gpu, capsys):
        gpu.refused = ("fprop",)
        assert run("tune", "seen:conv", "--shapes", SHAPES, "--quiet") == 1
        assert "1 failed" in capsys.readouterr().out

    def test_without_a_gpu(self, no_gpu, capsys):
        assert run("tune", "seen:conv", "--shapes", SHAPES) == 1
        assert capsys.readouterr().err.startswith(
            "jaxcudnn tune: plans must be listed and measured"
        )


class TestTarget:
    @pytest.mark.parametrize(
        ("target", "shapes", "text"),
        [
            (
                "seen",
                SHAPES,
                "jaxcudnn: what to trace must be module:function, got 'seen'; write "
                "train:make_step for the function make_step of train.py in this folder",
            ),
            (":conv", SHAPES, "jaxcudnn: what to trace must be module:function, got ':conv'"),
            (
                "unseen.net:conv",
                SHAPES,
                "jaxcudnn: there must be a module unseen.net, got none; run the command in the "
                "folder that has unseen/net.py, or install it",
            ),
            (
                "seen:conf",
                SHAPES,
                "jaxcudnn: seen must have conf, got module 'seen' has no attribute 'conf'; check "
                "the name",
            ),
            ("seen:number", SHAPES, "jaxcudnn: seen:number must be a function, got int; name one"),
            (
                "seen:conv",
                None,
                "jaxcudnn: seen:conv must take no arguments where --shapes is not given, got one "
                "for which missing a required argument: 'x'; add --shapes 'f32[8,32,32,16],...'",
            ),
            *(
                (
                    f"seen:{name}",
                    None,
                    f"jaxcudnn: seen:{name} must return (function, arguments) where --shapes is "
                    f"not given, got {kind}; return the function to trace and a tuple",
                )
                for name, kind in (
                    ("one", "int"),
                    ("three", "tuple"),
                    ("not_a_function", "tuple"),
                    ("not_arguments", "tuple"),
                )
            ),
        ],
    )
    @pytest.mark.parametrize("command", ["explain", "tune"])
    def test_refusals(self, gpu, capsys, command, target, shapes, text):
        options = [] if shapes is None else ["--shapes", shapes]
        assert run(command, target, *options) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(text)

    def test_an_import_that_fails_inside_the_module(self, no_gpu):
        with pytest.raises(ModuleNotFoundError, match="a_module_that_there_is_not"):
            run("explain", "needs:conv", "--shapes", SHAPES)


class TestShapes:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("f32[8,32,32,16]", [((8, 32, 32, 16), "float32")]),
            ("bf16[1], f16[2,3]", [((1,), "bfloat16"), ((2, 3), "float16")]),
            (" float64[ 4 , 5 ] ,i8[]", [((4, 5), "float64"), ((), "int8")]),
            ("f8_e4m3fn[2],c64[1],u8[3]", [
                ((2,), "float8_e4m3fn"), ((1,), "complex64"), ((3,), "uint8"),
            ]),
        ],
    )  # fmt: skip
    def test_read(self, text, expected):
        found = parse_shapes(text)
        assert [(each.shape, each.dtype.name) for each in found] == expected

    @pytest.mark.parametrize("text", _command_target._DTYPES)
    def test_every_dtype_as_jax_prints_it(self, text):
        with jax.enable_x64(True):
            (struct,) = parse_shapes(f"{text}[2,3]")
            printed = str(jax.make_jaxpr(lambda x: x)(struct))
        assert f"a:{text}[2,3]." in printed
        assert isinstance(struct.dtype, np.dtype)

    @pytest.mark.parametrize(
        ("text", "at"),
        [
            ("", r"'' at character 1"),
            ("f32", r"'f32' at character 1"),
            ("f31[2]", r"'f31\[2\]' at character 1"),
            ("f32[2],[3]", r"'\[3\]' at character 8"),
            ("f32[2]f32[3]", r"'f32\[2\]f32\[3\]' at character 1"),
            ("f32[2,-3]", r"'f32\[2,-3\]' at character 1"),
        ],
    )
    def test_refusals(self, text, at):
        with pytest.raises(
            ValueError,
            match=r"jaxcudnn: --shapes must be like 'f32\[8,32,32,16\],bf16\[16\]', got "
            + at
            + r"; dtypes are bool, i8, .*, c128, or their full names",
        ):
            parse_shapes(text)
