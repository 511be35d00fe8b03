# SPDX-License-Identifier: Apache-2.0
"""Plans that are measured, named, stored and kept deterministic, on the GPU.

Operands are small integers wherever results are compared with ==.
"""

import math
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcudnn
import oracle
from cases import CUDNN_CASES, OPERANDS, Case, integers, named
from jaxcudnn import TuningBudget, _load, _lowering, _plans, _reference, store
from processes import run_python
from test_gpu_fuzz import draw_case

pytestmark = pytest.mark.gpu

NHWC = ("NHWC", "OHWI", "NHWC")
TENSOR_CORE = "CUDNN_NUMERICAL_NOTE_TENSOR_CORE"
NONDETERMINISTIC = "CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC"
FULL = [c for c in CUDNN_CASES if 0 not in (*c.x_shape, *c.w_shape, *c.y_shape)]


@pytest.fixture(autouse=True)
def forget():
    """Nothing is known from other tests."""
    _load.cudnn().clear_cache()
    _plans.forget()


def bound(f, *operands):
    """The one operation in a function, and what its primitive is told."""
    (equation,) = (
        each
        for each in jax.make_jaxpr(f)(*operands).eqns
        if each.primitive.name.startswith("conv_")
    )
    return equation.primitive.name.removeprefix("conv_"), equation.params


def attributes_of(f, *operands):
    """The attributes of the one call in a function, with the options in force."""
    op, params = bound(f, *operands)
    (step,) = _lowering.steps(op, getattr(_reference, op), **params)
    assert step.attributes is not None
    return step.attributes


def structs(case: Case, role: str, dtype: str):
    return (jax.ShapeDtypeStruct(case.shape(name), dtype) for name in OPERANDS[role])


def described(case: Case, role: str, dtype: str, **keywords):
    """The attributes of the call that computes a role."""
    return attributes_of(case.cudnn(role, **keywords), *structs(case, role, dtype))


def nameable(case: Case, role: str, dtype: str):
    """The plans that can be named: the operation's own, even where another would compute it."""
    op, params = bound(case.cudnn(role), *structs(case, role, dtype))
    return _plans.candidates(_lowering._attributes(op, **params), 0)


def compute(case: Case, role: str, dtype: str, **keywords):
    """A role from integers, in a program of its own, and what it must be."""
    arrays = {name: integers(i, case.shape(name), dtype) for i, name in enumerate("xwy")}
    given = [arrays[name] for name in OPERANDS[role]]
    function = case.cudnn(role, **keywords)
    computed = jax.jit(lambda *operands: function(*operands))(*given)
    exact, _ = oracle.compute(role, *given, case=case)
    return np.asarray(computed), exact.astype(dtype)


def layer(dtype="bfloat16", n=8, size=28, channels=64):
    x = integers(0, (n, size, size, channels), dtype)
    w = integers(1, (channels, 3, 3, channels), dtype)
    return jnp.asarray(x), jnp.asarray(w)


def conv(x, w, **rest):
    return jaxcudnn.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC, **rest)


def temporary_bytes(compiled):
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("algorithm", ["measure", "exhaustive"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_measured_plans_compute_the_definition(algorithm, dtype):
    changes = {"algorithm": algorithm, "allow_runtime_compilation": False}
    with jaxcudnn.options(**changes):
        for case in FULL[:: 2 if algorithm == "measure" else 5]:
            for role in OPERANDS:
                computed, expected = compute(case, role, dtype)
                np.testing.assert_array_equal(computed, expected, err_msg=f"{case} {role}")
                plan = _plans.known(described(case, role, dtype), 0)
                assert plan.source == "measured" and plan.tried >= 1 and plan.microseconds > 0


@pytest.mark.parametrize("seed", range(8))
def test_every_candidate_computes_the_definition(seed):
    """Plans may be chosen that the heuristics put last: all of them are right."""
    case, dtype = draw_case(seed)
    for role in OPERANDS:
        with jaxcudnn.options(algorithm="exhaustive", allow_runtime_compilation=False):
            plans = nameable(case, role, dtype)
        assert plans
        for plan in plans[:20]:
            with jaxcudnn.options(algorithm={_operation(role): plan.name}):
                computed, expected = compute(case, role, dtype)
                known = _plans.known(described(case, role, dtype), 0)
            assert (known.name, known.source) == (plan.name, "named")
            np.testing.assert_array_equal(computed, expected, err_msg=f"{plan.name} {case} {role}")


def _operation(role: str) -> str:
    return {"y": "fprop", "x": "dgrad", "w": "wgrad"}[role]


class TestMeasuring:
    def test_happens_once(self):
        x, w = layer()
        with jaxcudnn.options(algorithm="measure"):
            attributes = attributes_of(conv, x, w)
            assert _plans.known(attributes, 0) is None
            jax.block_until_ready(jax.jit(conv)(x, w))
            plan = _plans.known(attributes, 0)
            before = _load.native().cache_info()
            jax.block_until_ready(jax.jit(lambda x, w: conv(x, w) + 1)(x, w))
            after = _load.native().cache_info()
        assert plan.source == "measured" and plan.tried > 1
        assert after.builds == before.builds and after.misses == before.misses

    def test_programs_are_the_same_before_and_after(self, tmp_path, monkeypatch):
        """Also in a process that has the plan from the store, and builds no candidates."""
        monkeypatch.setenv("JAXCUDNN_STORE", str(tmp_path / "store"))
        x, w = layer()

        def text():
            return jax.jit(lambda x, w: conv(x, w)).lower(x, w).as_text()

        with jaxcudnn.options(algorithm="measure"):
            attributes = attributes_of(conv, x, w)
            before = text()
            largest = _load.native().largest_workspace(0, **attributes)
            jax.block_until_ready(jax.jit(conv)(x, w))
            assert _plans.known(attributes, 0).source == "measured"
            assert text() == before
            jaxcudnn.clear_cache()
            assert text() == before
            assert _plans.known(attributes, 0).source == "stored"
            key = _load.native().choice_key(**attributes)
        # Choices of earlier tests may have waited for a store to be written to.
        (kept,) = (entry for entry in store.entries() if entry.key == key)
        assert kept.reserved == largest >= kept.workspace

    def test_budget_is_kept(self):
        x, w = layer()
        with jaxcudnn.options(algorithm="measure", tuning_budget=TuningBudget(candidates=3)):
            tuning = _plans.measure(attributes_of(conv, x, w), 0)
        timed = [timing.name for timing in tuning.timings if not timing.reason]
        assert len(timed) == 3
        assert {t.reason for t in tuning.timings if t.reason} == {"the budget was spent"}
        assert tuning.plan.tried == 3 and tuning.plan.name in timed
        budget = TuningBudget(milliseconds=1e-3)
        with jaxcudnn.options(algorithm="measure", tuning_budget=budget):
            tuning = _plans.measure(attributes_of(conv, x, w), 0)
        assert sum(not timing.reason for timing in tuning.timings) == 1

    def test_the_fastest_is_chosen(self):
        x, w = layer()
        with jaxcudnn.options(algorithm="measure"):
            tuning = _plans.measure(attributes_of(conv, x, w), 0)
        times = {t.name: t.microseconds for t in tuning.timings if not math.isnan(t.microseconds)}
        assert times[tuning.plan.name] == min(times.values())
        assert tuning.plan.microseconds == times[tuning.plan.name]
        assert tuning.milliseconds > 0

    def test_without_memory_the_first_plan_runs(self):
        x, w = layer()
        with jaxcudnn.options(algorithm="measure"):
            attributes = attributes_of(conv, x, w)
            tuning = _load.native().measure(0, 0, 0, **attributes)
        assert {timing.reason for timing in tuning.timings} == {"memory is short"}
        assert tuning.plan.source == "heuristic"
        first = _plans.known(attributes | {"algorithm": "heuristic"}, 0)
        assert tuning.plan.name == first.name

    def test_in_many_threads_at_once(self):
        sizes = [(8, 20 + 2 * i, 64) for i in range(4)] * 4

        def run(size):
            n, positions, channels = size
            x, w = layer(n=n, size=positions, channels=channels)
            with jaxcudnn.options(algorithm="measure"):
                return jax.block_until_ready(jax.jit(lambda x, w: conv(x, w))(x, w))

        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(run, sizes))
        for size, result in zip(sizes, results, strict=True):
            x, w = layer(n=size[0], size=size[1], channels=size[2])
            np.testing.assert_array_equal(result, jax.jit(conv)(x, w))

    def test_beside_other_work_on_the_stream(self):
        """Memory that queued kernels still use must not be written to."""
        a = jnp.asarray(integers(2, (4096, 4096), "bfloat16"))
        x, w = layer()

        @jax.jit
        def busy(a):
            for _ in range(8):
                a = jnp.sign(a @ a)
            return a

        expected = jax.block_until_ready(busy(a))
        with jaxcudnn.options(algorithm="measure"):
            tuned = jax.jit(conv).lower(x, w).compile()
            queued = busy(a)
            y = tuned(x, w)
        np.testing.assert_array_equal(queued, expected)
        np.testing.assert_array_equal(y, jax.jit(lambda x, w: conv(x, w))(x, w))

    def test_what_is_not_verified_is_not_chosen(self, monkeypatch):
        """Partial sums in bfloat16, which only this option lets through the table, are seen."""
        x = jax.ShapeDtypeStruct((64, 56, 56, 64), jnp.bfloat16)
        dy = jax.ShapeDtypeStruct((64, 56, 56, 64), jnp.bfloat16)

        def wgrad(x, dy):
            return jaxcudnn.conv_wgrad(x, dy, (3, 3), padding=1, dimension_numbers=NHWC)

        names = {}
        for allowed in (False, True):
            with jaxcudnn.options(
                algorithm="exhaustive",
                allow_runtime_compilation=False,
                allow_reduced_precision_reduction=allowed,
            ):
                plans = _plans.candidates(attributes_of(wgrad, x, dy), 0)
            names[allowed] = {plan.name for plan in plans}
        assert names[False] < names[True]


class TestCache:
    @pytest.fixture(autouse=True)
    def restore(self):
        yield
        _load.native().set_cache_capacity(4096)

    def test_what_a_program_uses_survives_eviction(self):
        """Recorded in command buffers, too: those replay the plans' kernels."""
        _load.native().set_cache_capacity(1)
        sizes = [12 + 2 * i for i in range(6)]
        programs = []
        for size in sizes:
            x, w = layer(size=size)
            chain = jax.jit(lambda x, w: conv(jnp.sign(conv(jnp.sign(conv(x, w)), w)), w))
            programs.append((chain, x, w, jax.block_until_ready(chain(x, w))))
        info = jaxcudnn.cache_info()
        assert info.size <= 1 and info.evictions >= len(sizes) - 1
        for _ in range(20):
            for chain, x, w, first in programs:
                np.testing.assert_array_equal(chain(x, w), first)

    def test_is_cleared_and_fills_again(self):
        x, w = layer()
        first = jax.block_until_ready(jax.jit(conv)(x, w))
        before = jaxcudnn.cache_info()
        assert before.size == before.builds == 1 and before.bytes > 0 and before.seconds > 0
        jaxcudnn.clear_cache()
        assert jaxcudnn.cache_info()[:5] == (0, 0, 0, 0, 0) and jaxcudnn.cache_info().bytes == 0
        np.testing.assert_array_equal(jax.jit(lambda x, w: conv(x, w))(x, w), first)
        assert jaxcudnn.cache_info().builds == 1


class TestOptions:
    def test_named_plans(self):
        x, w = layer()
        with jaxcudnn.options(algorithm="exhaustive", allow_runtime_compilation=False):
            plans = _plans.candidates(attributes_of(conv, x, w), 0)
        expected = jax.jit(conv)(x, w)
        assert len(plans) > 8
        for plan in plans:
            with jaxcudnn.options(algorithm=plan.name):
                np.testing.assert_array_equal(jax.jit(lambda x, w: conv(x, w))(x, w), expected)
                assert _plans.known(attributes_of(conv, x, w), 0).name == plan.name

    def test_a_name_that_there_is_not(self):
        x, w = layer()
        with (
            jaxcudnn.options(algorithm="eng62_k2=99"),
            pytest.raises(
                ValueError,
                match=r"has no plan 'eng62_k2=99' .*; the nearest are eng62_k2=.*, eng62",
            ),
        ):
            jax.jit(conv)(x, w)

    def test_excluded_engines(self):
        x, w = layer()
        excluded = set()
        for _ in range(3):
            changes = {"exclude_engines": tuple(excluded), "algorithm": "heuristic"}
            with jaxcudnn.options(**changes):
                name = _plans.known(attributes_of(conv, x, w), 0).name
            engine = name.split("_")[0]
            assert engine not in excluded
            excluded.add(engine)

    def test_no_plan_within_the_limit(self):
        """cuDNN has plans without workspace, so the limit is met whatever it is."""
        x, w = layer(dtype="float32")
        with jaxcudnn.options(workspace_limit=1):
            compiled = jax.jit(conv).lower(x, w).compile()
            assert _plans.known(attributes_of(conv, x, w), 0).workspace_size <= 1
        room = w.nbytes + 512
        assert temporary_bytes(compiled) <= room
        np.testing.assert_array_equal(compiled(x, w), jax.jit(lambda x, w: conv(x, w))(x, w))

    def test_no_engine_left(self):
        x, w = layer()
        everything = tuple(f"eng{i}" for i in range(200))
        with jaxcudnn.options(exclude_engines=everything):
            lowered = jax.jit(conv).lower(x, w)
        assert "stablehlo.convolution" in lowered.as_text()
        np.testing.assert_array_equal(lowered.compile()(x, w), jax.jit(conv)(x, w))

    @pytest.mark.parametrize("role", OPERANDS)
    @pytest.mark.parametrize("algorithm", ["heuristic", "measure", "exhaustive"])
    def test_highest_precision_has_no_tensor_cores(self, role, algorithm):
        for case in named("2d", "2d-asymmetric", "3d-grouped-dilated"):
            changes = {"algorithm": algorithm, "allow_runtime_compilation": False}
            with jaxcudnn.options(**changes):
                attributes = described(case, role, "float32", precision="highest")
                plans = _plans.candidates(attributes, 0)
                assert plans
                assert all(TENSOR_CORE not in plan.notes for plan in plans)
            with jaxcudnn.options(allow_tf32=False, **changes):
                names = [p.name for p in _plans.candidates(described(case, role, "float32"), 0)]
            assert names == [plan.name for plan in plans]


class TestDeterminism:
    def test_engines_that_say_they_are_not_are_not_used(self):
        met = False
        for case in named("2d", "2d-asymmetric"):
            for role in OPERANDS:
                by_wish = []
                for wanted in (False, True):
                    with jaxcudnn.options(
                        algorithm="exhaustive", deterministic=wanted, allow_tf32=False,
                        allow_runtime_compilation=False,
                    ):  # fmt: skip
                        by_wish.append(_plans.candidates(described(case, role, "float32"), 0))
                free, kept = by_wish
                assert kept and all(NONDETERMINISTIC not in plan.notes for plan in kept)
                met = met or any(NONDETERMINISTIC in plan.notes for plan in free)
        assert met  # else nothing was shown

    def test_nothing_is_timed_for_it(self):
        x, w = layer()
        with jaxcudnn.options(algorithm="measure", deterministic=True):
            jax.block_until_ready(jax.jit(conv)(x, w))
            plan = _plans.known(attributes_of(conv, x, w), 0)
        assert plan.source == "heuristic" and math.isnan(plan.microseconds)

    def test_unless_it_was_asked_for(self):
        x, w = layer()
        with jaxcudnn.options(algorithm="measure", deterministic=True):
            tuning = _plans.measure(attributes_of(conv, x, w), 0)
            plan = _plans.known(attributes_of(conv, x, w), 0)
        assert plan.source == "measured" and plan.name == tuning.plan.name

    def test_bits_are_equal_between_runs_and_processes(self):
        script = f"""
            import hashlib
            import jax, jax.numpy as jnp, numpy as np, jaxcudnn
            draw = np.random.default_rng(0)
            x = jnp.asarray(draw.standard_normal((8, 28, 28, 32)), jnp.float32)
            w = jnp.asarray(draw.standard_normal((48, 3, 3, 32)), jnp.float32)
            def conv(x, w):
                return jaxcudnn.conv_general_dilated(
                    x, w, (1, 1), "SAME", dimension_numbers={NHWC}, precision="highest")
            @jax.jit
            def passes(x, w):
                y, pullback = jax.vjp(conv, x, w)
                return y, *pullback(y)
            @jax.jit
            def differing(a, b):
                return sum(jnp.sum(p != q) for p, q in zip(a, b))
            with jaxcudnn.options(deterministic=True):
                first = passes(x, w)
                wrong = 0
                for _ in range(1000):
                    wrong += differing(passes(x, w), first)
            print(int(wrong))
            for array in first:
                print(hashlib.sha256(np.asarray(array).tobytes()).hexdigest())
        """
        ran = [run_python(script, JAX_PLATFORMS="cuda,cpu") for _ in range(3)]
        assert ran[0][0] == "0"
        assert len(set(ran[0][1:])) == 3
        assert ran[0] == ran[1] == ran[2]

    def test_flag_of_xla(self):
        script = """
            import jax, jax.numpy as jnp, jaxcudnn
            from jaxcudnn import _lowering, _plans, _reference
            jax.devices("cuda")
            x, w = jnp.ones((8, 64, 28, 28)), jnp.ones((64, 64, 3, 3))
            f = lambda x, w: jaxcudnn.conv_wgrad(x, x, (3, 3), padding=1, precision="highest")
            (eqn,) = [e for e in jax.make_jaxpr(f)(x, w).eqns if e.primitive.name == "conv_wgrad"]
            (step,) = _lowering.steps("wgrad", _reference.wgrad, **eqn.params)
            plan = _plans.known(step.attributes, 0)
            print(plan.name, "CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC" in plan.notes)
        """
        flag = "--xla_gpu_deterministic_ops=true"
        (free,), (kept,) = (
            run_python(script, JAX_PLATFORMS="cuda,cpu", XLA_FLAGS=flags) for flags in ("", flag)
        )
        assert free.endswith("True")  # else the next line shows nothing
        assert kept.endswith("False")


class TestStore:
    SCRIPT = f"""
        import time
        import jax, jax.numpy as jnp, jaxcudnn
        from jaxcudnn import _lowering, _plans, _reference
        jax.devices("cuda")
        x, w = jnp.ones((8, 28, 28, 64), jnp.bfloat16), jnp.ones((64, 3, 3, 64), jnp.bfloat16)
        def conv(x, w):
            return jaxcudnn.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers={NHWC})
        def loss(x, w):
            return jnp.sum(conv(conv(x, w), w).astype(jnp.float32))
        jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1)))(x, w))
        def equations(jaxpr):
            for eqn in jaxpr.eqns:
                if eqn.primitive.name.startswith("conv_"):
                    yield eqn
        for eqn in equations(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w).jaxpr):
            op = eqn.primitive.name.removeprefix("conv_")
            (step,) = _lowering.steps(op, getattr(_reference, op), **eqn.params)
            plan = _plans.known(step.attributes, 0)
            print(op, plan.name, plan.source, plan.microseconds, plan.tried)
    """

    def run(self, path, **changes):
        environment = {
            "JAX_PLATFORMS": "cuda,cpu",
            "JAXCUDNN_STORE": str(path),
            "JAXCUDNN_ALGORITHM": "measure",
        }
        lines = run_python(self.SCRIPT, **environment | changes)
        return sorted(set(map(tuple, map(str.split, lines))))

    def test_a_second_process_measures_nothing(self, tmp_path):
        first = self.run(tmp_path / "store")
        second = self.run(tmp_path / "store")
        assert {line[2] for line in first} == {"measured"}
        assert {line[2] for line in second} == {"stored"}
        assert [(op, name, us, tried) for op, name, _, us, tried in first] == [
            (op, name, us, tried) for op, name, _, us, tried in second
        ]
        assert len(first) == 3

    def test_other_options_have_their_own(self, tmp_path):
        self.run(tmp_path / "store")
        other = self.run(tmp_path / "store", JAXCUDNN_TUNING_BUDGET="4")
        assert {(line[2], line[4]) for line in other} == {("measured", "4")}

    def test_a_corrupt_one_is_rebuilt(self, tmp_path):
        path = tmp_path / "store"
        path.write_bytes(b"no database" * 1000)
        assert {line[2] for line in self.run(path)} == {"measured"}
        assert {line[2] for line in self.run(path)} == {"stored"}
