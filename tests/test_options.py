# SPDX-License-Identifier: Apache-2.0
"""Options of plans: what they accept, where they hold, and what the environment says."""

import dataclasses
import enum
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcudnn
from jaxcudnn import Options, TuningBudget, _options
from processes import run_python

NAMES = [field.name for field in dataclasses.fields(Options)]


@pytest.fixture(name="environment", autouse=True)
def clean_environment(monkeypatch):
    """Without variables, and with a way to set some."""
    for name in NAMES:
        monkeypatch.delenv(f"JAXCUDNN_{name.upper()}", raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    caches = (_options.from_environment, _options.xla_is_deterministic)

    def set_variables(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        for cache in caches:
            cache.cache_clear()

    set_variables()
    yield set_variables
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


def options_of(f, *arguments):
    """The options of the convolutions of a function."""
    jaxpr = jax.make_jaxpr(f)(*arguments)
    found = [eqn.params["spec"].options for eqn in jaxpr.eqns if "spec" in eqn.params]
    assert found
    return found


def conv(x, w, **rest):
    return jaxcudnn.conv(x, w, (1, 1), "SAME", **rest)


@pytest.fixture(name="arrays")
def make_arrays():
    return jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 3, 3))


class TestValues:
    def test_defaults(self):
        assert Options() == Options(
            algorithm="measure",
            workspace_limit=None,
            deterministic=False,
            allow_tf32=True,
            allow_reduced_precision_reduction=False,
            allow_runtime_compilation=True,
            exclude_engines=(),
            tuning_budget=TuningBudget(64, 5.0, 250.0),
            verify=True,
            routes=True,
        )
        assert _options.current() == Options()

    def test_are_frozen_and_hashable(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            Options().verify = False  # pyright: ignore[reportAttributeAccessIssue]
        by_op = Options(algorithm={"wgrad": "heuristic", "fprop": "eng5"})
        assert hash(by_op) == hash(Options(algorithm={"fprop": "eng5", "wgrad": "heuristic"}))

    def test_algorithm_by_operation(self):
        by_op = Options(algorithm={"wgrad": "heuristic", "fprop": "eng5_k2=1"})
        assert [by_op.algorithm_for(op) for op in ("fprop", "dgrad", "wgrad")] == [
            "eng5_k2=1", "measure", "heuristic",
        ]  # fmt: skip
        assert Options(algorithm="exhaustive").algorithm_for("dgrad") == "exhaustive"

    def test_pairs_are_what_a_mapping_becomes(self):
        by_op = Options(algorithm={"wgrad": "heuristic", "fprop": "eng5"})
        assert dataclasses.replace(by_op) == by_op
        pairs = (("wgrad", "heuristic"), ("fprop", "eng5"))
        assert Options(algorithm=pairs).algorithm == by_op.algorithm == pairs[::-1]

    def test_numpys_numbers_are_pythons(self):
        class Limit(enum.IntEnum):
            SMALL = 4096

        numbers: list[Any] = [np.int32(8), np.float32(0.5), np.int64(20)]
        values: dict[str, Any] = {
            "algorithm": np.str_("measure"),
            "workspace_limit": Limit.SMALL,
            "deterministic": np.True_,
            "exclude_engines": [np.str_("eng5")],
            "tuning_budget": TuningBudget(*numbers),
        }
        given = Options(**values)
        assert given == Options(
            workspace_limit=4096,
            deterministic=True,
            exclude_engines=("eng5",),
            tuning_budget=TuningBudget(8, 0.5, 20.0),
        )
        kept = [*dataclasses.astuple(given), *given.exclude_engines]
        kept += dataclasses.astuple(given.tuning_budget)
        assert {type(value) for value in kept} == {str, int, bool, tuple, float}
        values["workspace_limit"] = np.int64(5)
        assert Options(**values).workspace_limit == 5

    def test_engines_are_sorted_by_number(self):
        assert Options(exclude_engines=["eng57", "eng5", "eng57"]).exclude_engines == (
            "eng5",
            "eng57",
        )

    def test_routes(self):
        def kept(options: Any) -> tuple[str, ...]:
            return options.routes

        exact = ("matmul", "space_to_depth", "blocks", "shifts", "toeplitz")
        assert Options().routes == Options(routes=True).routes == exact
        no: Any = np.False_
        assert Options(routes=False).routes == Options(routes=no).routes == ()
        assert Options(routes=["fft", "shifts", "matmul"]).routes == ("matmul", "shifts", "fft")
        assert Options(routes={"shifts"}) == Options(routes=(np.str_("shifts"), "shifts"))
        assert [type(name) for name in kept(Options(routes=[np.str_("shifts")]))] == [str]

    @pytest.mark.parametrize(
        "error, match, values",
        [
            (TypeError, r"routes must be True, False or a tuple of names, got 'fft'; write \('mat",
             {"routes": "fft"}),
            (TypeError, "routes must be .*, got None", {"routes": None}),
            (ValueError, "routes must be among matmul, space_to_depth, .*, fft, got 'dft'; write",
             {"routes": ["dft"]}),
            (ValueError, "routes must be among .*, got 3", {"routes": (3,)}),
            (ValueError, r"algorithm must be one of .* a plan's name, got 'fast'; jaxcudnn.plans",
             {"algorithm": "fast"}),
            (TypeError, "algorithm must be a string, got 3", {"algorithm": 3}),
            (TypeError, "algorithm must be a string, got None", {"algorithm": {"fprop": None}}),
            *[
                (TypeError, "algorithm must be a string, got .*; write 'measure', or",
                 {"algorithm": value})
                for value in [["measure"], ("fprop", "measure"), (["fprop"],),
                              (("fprop", "eng5"), ("fprop", "eng6"))]
            ],
            (ValueError, "by operation must be .*, got 1", {"algorithm": {"fprop": "eng5", 1: ""}}),
            (ValueError, "algorithm must be .*, got 'engine 5'", {"algorithm": "engine 5"}),
            (ValueError, "algorithm must be .*, got 'eng5 '", {"algorithm": "eng5 "}),
            (ValueError, "by operation must be for fprop, dgrad, wgrad, got 'bprop'",
             {"algorithm": {"bprop": "measure"}}),
            (ValueError, "workspace_limit must be at least 1, got 0", {"workspace_limit": 0}),
            (ValueError, "workspace_limit must be at least 1, got -5", {"workspace_limit": -5}),
            (ValueError, "workspace_limit must be .*, got 9223", {"workspace_limit": 2**63}),
            (TypeError, "workspace_limit must be an integer, got 1.5", {"workspace_limit": 1.5}),
            (TypeError, "workspace_limit must be an integer, got True", {"workspace_limit": True}),
            (TypeError, "exclude_engines must be a tuple of names, got 'eng5'; write",
             {"exclude_engines": "eng5"}),
            (ValueError, "must hold engines' names, got 'eng5_k2=1'; write 'eng57', which",
             {"exclude_engines": ("eng5_k2=1",)}),
            (ValueError, "must hold engines' names, got 5", {"exclude_engines": (5,)}),
            *[
                (ValueError, f"must hold engines' names, got '{name}'", {"exclude_engines": [name]})
                for name in ("57", "eng057", "eng\u0663", "engine57")
            ],
            (TypeError, "tuning_budget must be a TuningBudget, got 5; write",
             {"tuning_budget": 5}),
            *[
                (TypeError, f"{name} must be True or False, got 1", {name: 1})
                for name in NAMES
                if isinstance(getattr(Options(), name), bool)
            ],
        ],
    )  # fmt: skip
    def test_refused(self, error, match, values):
        with pytest.raises(error, match=rf"^jaxcudnn\.Options: .*{match}"):
            Options(**values)
        with pytest.raises(error, match=match), jaxcudnn.options(**values):
            pass

    @pytest.mark.parametrize(
        "error, match, values",
        [
            (ValueError, "candidates must be at least 1, got 0", {"candidates": 0}),
            (TypeError, "candidates must be an integer, got 2.0", {"candidates": 2.0}),
            (ValueError, "milliseconds must be positive and finite, got 0; algorithm='heuristic'",
             {"milliseconds": 0}),
            (ValueError, ".* positive and finite, got inf", {"milliseconds": float("inf")}),
            (ValueError, ".* positive and finite, got nan", {"milliseconds": float("nan")}),
            (TypeError, "candidate_milliseconds must be a number, got '5'",
             {"candidate_milliseconds": "5"}),
            (TypeError, "milliseconds must be a number, got True", {"milliseconds": True}),
            (TypeError, "candidates must be an integer, got True", {"candidates": True}),
            (TypeError, r"candidates must be an integer, got np\.True_", {"candidates": np.True_}),
            (ValueError, "milliseconds must be positive and finite, got 1000",
             {"milliseconds": 10**400}),
        ],
    )  # fmt: skip
    def test_budget_refused(self, error, match, values):
        with pytest.raises(error, match=rf"^jaxcudnn\.TuningBudget: {match}"):
            TuningBudget(**values)


class TestScope:
    def test_nests_and_ends(self):
        with jaxcudnn.options(deterministic=True) as outer:
            with jaxcudnn.options(workspace_limit=5) as inner:
                assert inner == Options(deterministic=True, workspace_limit=5)
                assert _options.current() == inner
            assert _options.current() == outer == Options(deterministic=True)
        assert _options.current() == Options()

    def test_ends_with_an_error(self):
        with pytest.raises(KeyError), jaxcudnn.options(deterministic=True):
            raise KeyError
        assert _options.current() == Options()

    def test_unknown_name(self):
        with (
            pytest.raises(
                TypeError,
                match=r"^jaxcudnn\.options: options must be among .*, got 'determinstic'; "
                r"see jaxcudnn\.Options",
            ),
            jaxcudnn.options(determinstic=True),
        ):
            pass

    def test_jit_traces_again(self, arrays):
        traced = []

        @jax.jit
        def f(x, w):
            traced.append(_options.current())
            return conv(x, w)

        f(*arrays)
        with jaxcudnn.options(verify=False):
            f(*arrays)
        f(*arrays)
        with jaxcudnn.options(verify=False):
            f(*arrays)
        assert traced == [Options(), Options(verify=False)]

    def test_decorates(self, arrays):
        decorated = jaxcudnn.options(verify=False)(conv)
        assert options_of(decorated, *arrays) == [Options(verify=False)]

    def test_belongs_to_a_thread(self):
        seen = []
        with jaxcudnn.options(verify=False):
            thread = threading.Thread(target=lambda: seen.append(_options.current()))
            thread.start()
            thread.join()
        assert seen == [Options()]

    def test_what_is_differentiated_later_keeps_them(self, arrays):
        with jaxcudnn.options(verify=False):
            y, pullback = jax.vjp(conv, *arrays)
        assert options_of(pullback, y) == [Options(verify=False)] * 2


class TestOfACall:
    def test_changes_those_in_force(self, arrays):
        f = lambda x, w: conv(x, w, options={"verify": False})  # noqa: E731
        with jaxcudnn.options(deterministic=True):
            assert options_of(f, *arrays) == [Options(deterministic=True, verify=False)]

    def test_or_takes_their_place(self, arrays):
        f = lambda x, w: conv(x, w, options=Options(verify=False))  # noqa: E731
        with jaxcudnn.options(deterministic=True):
            assert options_of(f, *arrays) == [Options(verify=False)]

    @pytest.mark.parametrize(
        "function",
        ["conv", "conv_general_dilated", "conv_with_general_padding", "conv_transpose",
         "conv_fprop", "conv_dgrad", "conv_wgrad", "convolution"],
    )  # fmt: skip
    def test_every_function_checks_them(self, arrays, function):
        rest = {
            "conv": ((1, 1), "SAME"),
            "conv_general_dilated": ((1, 1), "SAME"),
            "conv_with_general_padding": ((1, 1), "SAME", None, None),
            "conv_transpose": ((1, 1), "SAME", None, ("NCHW", "OIHW", "NCHW")),
            "conv_fprop": (),
            "conv_dgrad": ((6, 6),),
            "conv_wgrad": ((2, 2),),
            "convolution": (None, 1, 0, 1, False, 0, 1),
        }[function]
        call = getattr(jaxcudnn, function)
        if function in ("conv_fprop", "conv_dgrad", "conv_wgrad"):
            call = functools.partial(call, padding=0)
        chosen = Options(exclude_engines=("eng3",))
        f = lambda x, w: call(x, w, *rest, options=chosen)  # noqa: E731
        assert options_of(f, *arrays) == [chosen]
        with pytest.raises(TypeError, match=rf"^jaxcudnn\.{function}: options must be .*, got 3;"):
            call(*arrays, *rest, options=3)
        with pytest.raises(TypeError, match=rf"^jaxcudnn\.{function}: .* got 'fast'; see"):
            call(*arrays, *rest, options={"fast": True})


class TestEnvironment:
    def test_every_option(self, environment):
        environment(
            JAXCUDNN_ALGORITHM="fprop=eng5_k2=1, dgrad=heuristic",
            JAXCUDNN_WORKSPACE_LIMIT="1048576",
            JAXCUDNN_DETERMINISTIC="1",
            JAXCUDNN_ALLOW_TF32="false",
            JAXCUDNN_ALLOW_REDUCED_PRECISION_REDUCTION="yes",
            JAXCUDNN_ALLOW_RUNTIME_COMPILATION="NO",
            JAXCUDNN_EXCLUDE_ENGINES="eng5, eng57",
            JAXCUDNN_TUNING_BUDGET="8,0.5,20",
            JAXCUDNN_VERIFY="0",
            JAXCUDNN_ROUTES="fft, matmul",
        )
        assert _options.current() == Options(
            algorithm={"fprop": "eng5_k2=1", "dgrad": "heuristic"},
            workspace_limit=1 << 20,
            deterministic=True,
            allow_tf32=False,
            allow_reduced_precision_reduction=True,
            allow_runtime_compilation=False,
            exclude_engines=("eng5", "eng57"),
            tuning_budget=TuningBudget(8, 0.5, 20),
            verify=False,
            routes=("matmul", "fft"),
        )

    def test_a_scope_changes_it(self, environment):
        environment(JAXCUDNN_ALGORITHM="heuristic")
        with jaxcudnn.options(verify=False) as chosen:
            assert chosen == Options(algorithm="heuristic", verify=False)

    def test_empty_is_unset(self, environment):
        environment(JAXCUDNN_ALGORITHM="", JAXCUDNN_VERIFY="")
        assert _options.current() == Options()

    @pytest.mark.parametrize(("text", "routes"), [("0", False), ("true", True), ("fft", ["fft"])])
    def test_routes(self, environment, text, routes):
        environment(JAXCUDNN_ROUTES=text)
        assert _options.current() == Options(routes=routes)

    def test_plan_with_one_knob(self, environment):
        """A name with an equals sign is still a name."""
        environment(JAXCUDNN_ALGORITHM="eng5_k2=1")
        assert _options.current().algorithm == "eng5_k2=1"

    @pytest.mark.parametrize(
        "name, text, match",
        [
            ("DETERMINISTIC", "perhaps", "must be 1 or 0, got 'perhaps'; unset"),
            ("WORKSPACE_LIMIT", "1GB", "must be a whole number of bytes, got '1GB'"),
            ("TUNING_BUDGET", "fast", "must be up to three numbers, as in 64,5,250, got 'fast'"),
            ("TUNING_BUDGET", "1,2,3,4", "must be up to three numbers"),
        ],
    )
    def test_unreadable(self, environment, name, text, match):
        environment(**{f"JAXCUDNN_{name}": text})
        with pytest.raises(ValueError, match=f"^jaxcudnn: .* JAXCUDNN_{name} {match}"):
            _options.current()

    @pytest.mark.parametrize(
        "name, text, match",
        [
            ("WORKSPACE_LIMIT", "0", "workspace_limit must be at least 1, got 0;"),
            ("ALGORITHM", "fastest", "algorithm must be one of .*, got 'fastest';"),
            ("ROUTES", "fast", "routes must be among .*, got 'fast';"),
            ("EXCLUDE_ENGINES", "eng5,5", "exclude_engines must hold engines' names, got '5';"),
        ],
    )
    def test_values_are_checked_as_ever(self, environment, name, text, match):
        environment(**{f"JAXCUDNN_{name}": text})
        rule = f"^jaxcudnn: the environment variable JAXCUDNN_{name} is an option, and {match}"
        with pytest.raises(ValueError, match=f"{rule}.* unset it for the default$"):
            _options.current()

    def test_is_read_once(self):
        lines = run_python(
            """
            import os
            import jaxcudnn
            from jaxcudnn import _options
            print(_options.current().algorithm)
            os.environ["JAXCUDNN_ALGORITHM"] = "exhaustive"
            print(_options.current().algorithm)
            """,
            JAXCUDNN_ALGORITHM="heuristic",
        )
        assert lines == ["heuristic", "heuristic"]

    @pytest.mark.parametrize(
        "flags, wanted",
        [
            ("", False),
            ("--xla_gpu_deterministic_ops=true", True),
            ("--xla_gpu_deterministic_ops", True),
            ("--xla_foo=1 --xla_gpu_exclude_nondeterministic_ops=1", True),
            ("--xla_gpu_deterministic_ops=false", False),
            ("--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false", False),
            ("--xla_gpu_deterministic_ops_not", False),
        ],
    )
    def test_flags_of_xla(self, environment, flags, wanted):
        environment(XLA_FLAGS=flags)
        assert _options.xla_is_deterministic() is wanted
