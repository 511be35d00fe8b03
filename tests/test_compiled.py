# SPDX-License-Identifier: Apache-2.0
"""What XLA makes of convolutions for an H200, compiled where there is none.

JAX's CUDA plugin is needed, but neither a GPU nor CUDA's libraries.
"""

from itertools import cycle, islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aot
import jaxcudnn
from aot import shaped
from cases import CHANNELS_LAST, CUDNN_CASES, OPERANDS, named, parametrize
from jaxcudnn import Options, _fusion, _load, _lowering

NHWC = CHANNELS_LAST[2]
NCHW = ("NCHW", "OIHW", "NCHW")
X, W = shaped((8, 14, 14, 64)), shaped((64, 3, 3, 64))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    aot.require_plugin()
    monkeypatch.setattr(_load, "local_device", lambda: None)


def conv(x, w, dimension_numbers=NHWC, strides=(1, 1), **options):
    return jaxcudnn.conv_general_dilated(
        x, w, strides, "SAME", dimension_numbers=dimension_numbers, **options
    )


def chain(x, w, count=5, dimension_numbers=NHWC):
    for _ in range(count):
        x = jnp.tanh(conv(x, w, dimension_numbers))
    return x


def network(filters, x):
    """Three layers: plain, strided and depthwise."""
    x = jnp.tanh(conv(x, filters[0]))
    x = jnp.tanh(conv(x, filters[1], strides=(2, 2)))
    return conv(x, filters[2], feature_group_count=64)


FILTERS = [W, W, shaped((64, 3, 3, 1))]


def training_step(filters, x):
    loss = lambda filters: jnp.mean(jnp.square(network(filters, x)))  # noqa: E731
    gradients = jax.grad(loss)(filters)
    rate = jnp.asarray(0.1, x.dtype)
    return [w - rate * g for w, g in zip(filters, gradients, strict=True)]


class TestCalls:
    def test_forward(self):
        assert aot.compile(network, FILTERS, X).operations == ["fprop"] * 3

    def test_training_step(self):
        """The gradient of the first layer's images is not asked for.

        That of the depthwise layer's is a forward convolution.
        """
        program = aot.compile(training_step, FILTERS, X)
        assert program.operations == ["dgrad"] + ["fprop"] * 4 + ["wgrad"] * 3

    def test_gradient_of_the_images_too(self):
        f = jax.grad(lambda x, filters: jnp.sum(jnp.sin(network(filters, x))))
        assert aot.compile(f, X, FILTERS).operations == ["dgrad"] * 2 + ["fprop"] * 4

    def test_equal_calls_are_merged_and_unused_ones_dropped(self):
        def f(x, w):
            conv(x, w[::-1])
            return conv(x, w) + conv(x, w)

        assert aot.compile(f, X, W).operations == ["fprop"]

    def test_vmap_is_one_call(self):
        x, w = shaped((4, *X.shape)), shaped((4, *W.shape))
        for axes, operands in [((0, None), (x, W)), ((None, 0), (X, w)), ((0, 0), (x, w))]:
            assert aot.compile(jax.vmap(conv, in_axes=axes), *operands).operations == ["fprop"]

    def test_scan_and_checkpoint(self):
        def f(filters, x):
            layer = jax.checkpoint(lambda x, w: (jnp.tanh(conv(x, w)), None))
            return jnp.sum(jax.lax.scan(layer, x, filters)[0])

        program = aot.compile(jax.grad(f), shaped((3, *W.shape)), X)
        assert program.operations == ["dgrad", "fprop", "fprop", "wgrad"]

    def test_extension_accepts_every_case_of_the_table(self):
        """XLA hands the attributes to the extension, which checks them, while it compiles."""
        cases = [c for c in CUDNN_CASES if 0 not in (*c.x_shape, *c.w_shape, *c.y_shape)]
        roles = list(islice(cycle(OPERANDS), len(cases)))  # the attributes differ in "op" alone
        functions = [case.cudnn(role) for case, role in zip(cases, roles, strict=True)]
        arguments = [
            [shaped(case.shape(operand), "float32") for operand in OPERANDS[role]]
            for case, role in zip(cases, roles, strict=True)
        ]
        program = aot.compile(
            lambda arguments: [f(*a) for f, a in zip(functions, arguments, strict=True)], arguments
        )
        assert len(program.calls) == len(cases)
        assert program.count("convolution") == 0


class TestMemoryLayout:
    @parametrize(
        named("1d-last", "2d-last", "2d-grouped-strided", "2d-same-lower", "3d-last-strided"),
        dtypes=["float32", "bfloat16"],
    )
    @pytest.mark.parametrize("computed", OPERANDS)
    def test_channels_last_is_left_as_it_is(self, case, computed, dtype):
        operands = [shaped(case.shape(role), dtype) for role in OPERANDS[computed]]
        program = aot.compile(case.cudnn(computed), *operands)
        (call,) = program.calls
        assert program.moves == []
        assert {i.opcode for i in program.entry} == {
            "parameter",
            "custom-call",
            "get-tuple-element",
        }
        in_order = tuple(range(len(case.x_shape)))
        assert call.operand_layouts == [in_order, in_order]

    def test_channels_last_training_step(self):
        assert aot.compile(training_step, FILTERS, X).moves == []

    def test_channels_first_is_transposed_at_entry_and_exit_only(self):
        def f(filters, x):
            for w in filters:
                x = jnp.tanh(conv(x, w, NCHW)) * 2 + 1
            return x

        program = aot.compile(f, [shaped((64, 64, 3, 3))] * 3, shaped((8, 64, 14, 14)))
        assert program.operations == ["fprop"] * 3
        assert {layout for call in program.calls for layout in call.operand_layouts} == {
            (0, 2, 3, 1)
        }
        parameters = {i.name for i in program.entry if i.opcode == "parameter"}
        *entries, exit = program.moves
        assert {operand for move in entries for operand in move.operands} == parameters
        assert len(entries) == len(parameters) == 4
        assert exit.is_root

    @pytest.mark.parametrize("letters", ["HWIO", "OIHW"])
    def test_another_filter_costs_one_transpose_of_the_filter(self, letters):
        sizes = dict(zip("OHWI", W.shape, strict=True))
        w = shaped(tuple(sizes[letter] for letter in letters))
        program = aot.compile(lambda x, w: conv(x, w, ("NHWC", letters, "NHWC")), X, w)
        (call,), (move,) = program.calls, program.moves
        assert call.operand_layouts[1] == tuple(map(letters.index, "OHWI"))
        (moved,) = move.operands
        assert moved.startswith("w")

    @pytest.mark.parametrize("letters, reverse", [("OHWI", True), ("IHWO", False)])
    def test_a_transposed_convolution_moves_nothing(self, letters: str, reverse: bool):
        def f(x, w):
            numbers = ("NHWC", letters, "NHWC")
            return jaxcudnn.conv_transpose(x, w, (2, 2), "SAME", None, numbers, reverse)

        program = aot.compile(f, shaped((8, 14, 14, 64)), shaped((64, 3, 3, 32)))
        assert program.operations == ["dgrad"]
        assert program.moves == []

    def test_a_filter_that_lies_as_a_transposed_one_is_read_so(self):
        w = shaped(tuple(dict(zip("OHWI", W.shape, strict=True))[letter] for letter in "IHWO"))
        program = aot.compile(lambda x, w: conv(x, w, ("NHWC", "IHWO", "NHWC")), X, w)
        assert program.operations == ["dgrad"]
        assert program.moves == []


class TestWorkspace:
    def test_five_calls_share_one(self):
        one = aot.compile(lambda x, w: chain(x, w, count=1), X, W).temporary_bytes
        five = aot.compile(chain, X, W).temporary_bytes
        images = 2 * np.prod(X.shape)
        assert one >= _lowering.WORKSPACE_BUDGET
        assert five <= one + 2 * images

    def test_is_little_more_than_is_asked_for(self, monkeypatch):
        monkeypatch.setattr(_lowering, "WORKSPACE_BUDGET", 0)
        room = 2 * np.prod(W.shape)  # for a copy of the filter
        assert aot.compile(conv, X, W).temporary_bytes <= room + 1024


class TestSlices:
    def test_kernels_compiled_at_run_time_get_and_give_whole_arrays(self, monkeypatch):
        """Of a slice they might get an address that they refuse; XLA would pass one in place."""
        monkeypatch.setattr(_fusion, "fused_form", lambda *args, **kwargs: "")
        shape, size = X.shape, X.size

        def f(flat, w, into):
            x = flat[1:-1].reshape(shape)
            arguments = {"padding": "SAME", "dimension_numbers": NHWC}
            y = jaxcudnn.conv_bias_act(x, w, residual=x, activation="gelu", **arguments)
            return jax.lax.dynamic_update_slice(into, y.ravel(), (1,))

        flat = shaped((size + 2,))
        program = aot.compile(f, flat, W, flat)
        (call,) = program.calls
        assert call.attributes["activation"] == "gelu"
        assert call.computation == "ENTRY"  # and not inside a fusion with slices


class TestCommandBuffer:
    @staticmethod
    def thunks(folder, f, *arguments):
        """The steps of the program, those within others indented."""
        aot.compile(f, *arguments, dump=folder)
        (file,) = folder.glob("*.thunk_sequence_after_thunk_passes.txt")
        return [line for line in file.read_text().splitlines() if line.strip()]

    def test_five_convolutions_with_operations_between_them(self, tmp_path):
        outer, *inner = self.thunks(tmp_path, chain, X, W)
        assert "kCommandBuffer" in outer
        assert all(line.startswith(" ") for line in inner)
        assert sum("kCustomCall" in line for line in inner) == 5
        assert len(inner) == 10

    def test_training_step(self, tmp_path):
        outer, *inner = self.thunks(tmp_path, training_step, FILTERS, X)
        assert "kCommandBuffer" in outer
        assert all(line.startswith(" ") for line in inner)
        assert sum("kCustomCall" in line for line in inner) == 8


class TestSeveralDevices:
    COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")

    @staticmethod
    def loss(w, x):
        return jnp.sum(jnp.square(conv(x, w).astype(jnp.float32)))

    def compile(self, f, out_specs, outer=lambda f: f):
        """Map f(w, x) over four devices, w replicated and x split; what it does there."""
        mesh = aot.mesh(4)
        f = jax.shard_map(f, mesh=mesh, in_specs=(jax.P(), jax.P("d")), out_specs=out_specs)
        x = aot.place(shaped((32, *X.shape[1:])), mesh, "d")
        program = aot.compile(outer(f), aot.place(W, mesh), x)
        assert {tuple(call.attributes["x"]) for call in program.calls} == {(8, 64, 14, 14)}
        counts = {name: program.count(name) for name in self.COLLECTIVES}
        return program.operations, {name: count for name, count in counts.items() if count}

    def test_gradient_of_a_replicated_filter_is_one_all_reduce(self):
        found = self.compile(jax.grad(self.loss), jax.P())
        assert found == (["fprop", "wgrad"], {"all-reduce": 1})

    def test_gradient_taken_outside(self):
        total = lambda w, x: jax.lax.psum(self.loss(w, x), "d")  # noqa: E731
        found = self.compile(total, jax.P(), outer=jax.grad)
        assert found == (["fprop", "wgrad"], {"all-reduce": 1})

    def test_gradient_of_the_images_needs_none(self):
        found = self.compile(jax.grad(self.loss, argnums=1), jax.P("d"))
        assert found == (["dgrad", "fprop"], {})


ATTRIBUTES = {
    "op": "fprop",
    "x": np.array([1, 8, 6, 6]),
    "w": np.array([8, 8, 3, 3]),
    "y": np.array([1, 8, 4, 4]),
    "stride": np.array([1, 1]),
    "pre_padding": np.array([0, 0]),
    "post_padding": np.array([0, 0]),
    "dilation": np.array([1, 1]),
    "flip": False,
    "dtype": "float32",
    "allow_tf32": True,
    "channels_first": False,
    "activation": "",
    "residual": False,
    "bias": False,
    "workspace_limit": 1 << 20,
    **_lowering._options_of(Options(algorithm="heuristic"), "fprop"),
}

HAVE_DEFAULTS = ("channels_first", "activation", "residual", "bias")


class TestAttributesFromElsewhere:
    """The custom call as an old or hand-written program may make it, past every check in Python."""

    @staticmethod
    def compile(attributes):
        results = shaped((1, 4, 4, 8), "float32"), shaped((1 << 20,), "uint8")
        call = jax.ffi.ffi_call(_load.TARGET, results)
        return aot.compile(
            lambda x, w: call(x, w, **attributes)[0],
            shaped((1, 6, 6, 8), "float32"),
            shaped((8, 3, 3, 8), "float32"),
        )

    def refuses(self, attributes, text):
        with pytest.raises(jax.errors.JaxRuntimeError, match=text) as error:
            self.compile(attributes)
        assert str(error.value).startswith("INVALID_ARGUMENT: jaxcudnn (instantiate): ")
        self.compile(ATTRIBUTES)  # nothing is broken

    def test_complete(self):
        assert self.compile(ATTRIBUTES).operations == ["fprop"]

    def test_more_than_is_read(self):
        assert self.compile({**ATTRIBUTES, "comment": "from the future"}).operations == ["fprop"]

    def test_those_of_later_schemas_are_missing(self):
        rest = {name: value for name, value in ATTRIBUTES.items() if name not in HAVE_DEFAULTS}
        assert self.compile(rest).operations == ["fprop"]

    @pytest.mark.parametrize("name", [name for name in ATTRIBUTES if name not in HAVE_DEFAULTS])
    def test_one_is_missing(self, name):
        rest = {key: value for key, value in ATTRIBUTES.items() if key != name}
        self.refuses(rest, f"attribute '{name}' is missing or of the wrong type")

    @pytest.mark.parametrize("name", ATTRIBUTES)
    def test_one_is_of_another_type(self, name):
        self.refuses(
            {**ATTRIBUTES, name: 1.5}, f"attribute '{name}' is missing or of the wrong type"
        )

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"op": "conv"}, "unknown operation 'conv'"),
            ({"dtype": "int3"}, "unknown dtype 'int3'"),
            ({"stride": np.array([1, 0])}, "stride and dilation must be positive, got op=fprop x="),
            ({"y": np.array([1, 8, 5, 4])}, "y must have the size"),
            ({"x": np.array([1, 8, 6])}, "two more dimensions than stride"),
            ({"x": np.array([0, 8, 6, 6])}, "sizes must be positive"),
            ({"x": np.array([0, 8, 6, 6]), "y": np.array([0, 8, 4, 5])}, "y must have the size"),
        ],
    )
    def test_one_makes_no_sense(self, changes, text):
        self.refuses({**ATTRIBUTES, **changes}, text)
