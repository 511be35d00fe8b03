# SPDX-License-Identifier: Apache-2.0
"""What a user may choose about the plans of convolutions, and the scope in which a choice holds.

The options in force where a call is traced become part of its `ConvSpec`, so that the derivatives
that JAX takes of it later have them too.
"""

import operator
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from numbers import Real
from typing import Any

import jax
import numpy as np

ALGORITHMS = ("heuristic", "measure", "exhaustive")
"""The ways to choose a plan; any other word that begins with an engine names one."""

OPERATIONS = ("fprop", "dgrad", "wgrad")

ROUTES = ("matmul", "space_to_depth", "blocks", "shifts", "toeplitz")
"""The routes that are exact: they sum the products that the definition names, and no others."""

INEXACT_ROUTES = ("fft",)
"""Those that are not, and so have to be asked for by name."""

_ENGINE = re.compile(r"eng(0|[1-9][0-9]*)")
_PLAN = re.compile(r"eng[0-9][!-~]*")  # its knobs are cuDNN's, which says whether there is one
_PREFIX = "JAXCUDNN_"
_DETERMINISTIC_FLAGS = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")


@dataclass(frozen=True)
class TuningBudget:
    """What measuring the plans of one new convolution may cost. A plan under way is not stopped.

    Attributes:
        candidates: how many plans are timed at most.
        candidate_milliseconds: for how long each is run at most, its first run apart.
        milliseconds: after how many no further plan is begun.
    """

    candidates: int = 64
    candidate_milliseconds: float = 5.0
    milliseconds: float = 250.0

    def __post_init__(self) -> None:
        """Check the values."""
        candidates = _int("candidates", self.candidates, minimum=1, of="TuningBudget")
        object.__setattr__(self, "candidates", candidates)
        for name in ("candidate_milliseconds", "milliseconds"):
            object.__setattr__(self, name, _milliseconds(name, getattr(self, name)))


@dataclass(frozen=True)
class Options:
    """How cuDNN's plan for a convolution is chosen. None of it changes what is computed elsewhere.

    Attributes:
        algorithm: 'heuristic', the plan that cuDNN puts first; 'measure', the fastest of those that
            it recommends, timed before the first execution within `tuning_budget` and remembered;
            'exhaustive', the fastest of all that it has, whatever that costs; or the name of a
            plan, which every convolution it holds for then uses. A mapping from 'fprop', 'dgrad'
            and 'wgrad' to these chooses by operation, 'measure' where it says nothing.
        workspace_limit: bytes of scratch memory; plans that need more are not considered. None is
            1 GiB, or twice what the convolution's own arrays take, if that is more.
        deterministic: whether only plans whose results are equal bit by bit from run to run are
            considered. They are taken in cuDNN's order, untimed, unless `jaxcudnn.tune` has timed
            them or one is named. XLA's flags for deterministic operations turn it on, too.
        allow_tf32: False forbids rounding float32 operands to TF32 whatever `precision` says.
        allow_reduced_precision_reduction: whether plans may keep partial sums of 16-bit
            convolutions in 16 bits.
        allow_runtime_compilation: whether plans are considered, after all others, that cuDNN
            compiles when they are built, for 0.3 to 5 seconds each.
        exclude_engines: names of engines, such as 'eng57', that are not used.
        tuning_budget: what 'measure' may cost for each new convolution.
        verify: whether a plan must reproduce sums computed on the host before it is timed.
        routes: by which other computations of the same sums convolutions may be replaced where
            those are faster: True for all that are exact, False for none, or a tuple of names:
            'matmul', 'space_to_depth', 'blocks', 'shifts', 'toeplitz', and 'fft', which is not
            exact.

    Raises:
        TypeError: for a value of the wrong kind.
        ValueError: for an unknown algorithm or route, a limit below 1, or a name that is not an
            engine's.
    """

    algorithm: str | Mapping[str, str] | tuple[tuple[str, str], ...] = "measure"
    workspace_limit: int | None = None
    deterministic: bool = False
    allow_tf32: bool = True
    allow_reduced_precision_reduction: bool = False
    allow_runtime_compilation: bool = True
    exclude_engines: Collection[str] = ()
    tuning_budget: TuningBudget = field(default_factory=TuningBudget)
    verify: bool = True
    routes: bool | Collection[str] = ROUTES

    def __post_init__(self) -> None:
        """Check the values, NumPy's among them, and make of them Python's own, which hash."""
        object.__setattr__(self, "algorithm", _algorithm(self.algorithm))
        if self.workspace_limit is not None:
            limit = _int("workspace_limit", self.workspace_limit, minimum=1, of="Options")
            object.__setattr__(self, "workspace_limit", limit)
        for name in [each.name for each in fields(self) if each.type is bool]:
            value = getattr(self, name)
            if not isinstance(value, (bool, np.bool_)):
                raise TypeError(f"jaxcudnn.Options: {name} must be True or False, got {value!r}")
            object.__setattr__(self, name, bool(value))
        object.__setattr__(self, "exclude_engines", _engines(self.exclude_engines))
        object.__setattr__(self, "routes", _routes(self.routes))
        if not isinstance(self.tuning_budget, TuningBudget):
            raise TypeError(
                f"jaxcudnn.Options: tuning_budget must be a TuningBudget, got "
                f"{self.tuning_budget!r}; write jaxcudnn.TuningBudget(milliseconds=100)"
            )

    def algorithm_for(self, op: str) -> str:
        """Give the algorithm, or the plan's name, for 'fprop', 'dgrad' or 'wgrad'."""
        if isinstance(self.algorithm, str):
            return self.algorithm
        return dict(self.algorithm).get(op, "measure")

    def allows_route(self, name: str) -> bool:
        """Say whether a route may be taken."""
        return not isinstance(self.routes, bool) and name in self.routes


OptionsLike = Options | Mapping[str, Any] | None
"""What functions take: options; a mapping of those that differ from the ones in force; nothing."""

_scoped = jax.make_user_context(default_value=None)


def current() -> Options:
    """Give the options in force: those of the scope, or those of the environment."""
    return _scoped.value or from_environment()


@contextmanager
def options(**changes: Any) -> Iterator[Options]:
    """Choose how plans are chosen, for all convolutions traced in a `with` block.

    Scopes nest: what an inner one does not name it has from the outer one, and the outermost from
    the environment (`JAXCUDNN_ALGORITHM` and so on, read once). `jax.jit` traces a function again
    where other options are in force. A decorated function is traced in the scope.

    Args:
        **changes: attributes of `jaxcudnn.Options`.

    Yields:
        The options in force.

    Raises:
        TypeError: for an unknown name, or as `jaxcudnn.Options`.
        ValueError: as `jaxcudnn.Options`.

    Example:
        >>> import jaxcudnn
        >>> with jaxcudnn.options(deterministic=True, workspace_limit=64 << 20) as chosen:
        ...     chosen.deterministic
        True
    """
    with using(changed(current(), changes, "jaxcudnn.options")):
        yield current()


def using(chosen: Options) -> AbstractContextManager[Any]:
    """Put these options in force in a `with` block, whatever those outside it say."""
    return _scoped(chosen)


def resolve(caller: object, given: OptionsLike) -> Options:
    """Read the `options` argument of a call: those that it says, over those in force.

    Raises:
        TypeError: if it is neither None, nor `Options`, nor a mapping of some of its attributes.
    """
    if given is None:
        return current()
    if isinstance(given, Options):
        return given
    if isinstance(given, Mapping):
        return changed(current(), given, caller)
    raise TypeError(
        f"{caller}: options must be jaxcudnn.Options or a dict of some of its attributes, got "
        f"{given!r}; write options={{'algorithm': 'heuristic'}}"
    )


def changed(old: Options, changes: Mapping[str, Any], caller: object) -> Options:
    """Give the same options but for some.

    Raises:
        TypeError: for a name that is not an attribute.
    """
    names = [each.name for each in fields(Options)]
    for name in changes:
        if name not in names:
            raise TypeError(
                f"{caller}: options must be among {', '.join(names)}, got {name!r}; see "
                f"jaxcudnn.Options"
            )
    return replace(old, **changes)


@lru_cache(maxsize=1)
def from_environment() -> Options:
    """Read the options that `JAXCUDNN_*` variables choose, at the first call of the process.

    Raises:
        ValueError: if a variable cannot be read as what it stands for.
    """
    values: dict[str, Any] = {}
    for name in [each.name for each in fields(Options)]:
        variable = _PREFIX + name.upper()
        text = os.environ.get(variable)
        if not text:
            continue
        values[name] = _read(name, text)
        try:
            Options(**{name: values[name]})
        except (TypeError, ValueError) as error:
            _, _, rule = str(error).partition(": ")
            raise ValueError(
                f"jaxcudnn: the environment variable {variable} is an option, and {rule}; write "
                f"another value or unset it for the default"
            ) from error
    return Options(**values)


@lru_cache(maxsize=1)
def xla_is_deterministic() -> bool:
    """Say whether XLA's flags ask for deterministic operations; XLA reads them once as well."""
    wanted = False
    for flag in os.environ.get("XLA_FLAGS", "").split():
        name, _, value = flag.removeprefix("--").partition("=")
        if name in _DETERMINISTIC_FLAGS:
            wanted = value.lower() in ("", "true", "1")
    return wanted


_FLAGS = {"0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}


def _read(name: str, text: str) -> Any:
    """Read one variable: numbers with commas for the budget, engines with commas, plain values."""
    try:
        if name == "tuning_budget":
            candidates, *milliseconds = text.split(",")
            return TuningBudget(int(candidates), *map(float, milliseconds))
        if name == "exclude_engines":
            return tuple(engine.strip() for engine in text.split(","))
        if name == "workspace_limit":
            return int(text)
        if name == "algorithm":
            if text.split("=")[0].strip() not in OPERATIONS:
                return text  # a plan's name may have equals signs, too
            return dict(part.strip().split("=", 1) for part in text.split(","))
        if name == "routes" and text.lower() not in _FLAGS:
            return tuple(route.strip() for route in text.split(","))
        return _FLAGS[text.lower()]
    except (KeyError, TypeError, ValueError) as error:
        wanted = {
            "tuning_budget": "up to three numbers, as in 64,5,250",
            "workspace_limit": "a whole number of bytes",
            "algorithm": "a name, or one for each operation, as in fprop=eng5,dgrad=measure",
        }.get(name, "1 or 0")
        variable = _PREFIX + name.upper()
        raise ValueError(
            f"jaxcudnn: the environment variable {variable} must be {wanted}, got {text!r}; unset "
            f"it for the default"
        ) from error


def _algorithm(value: Any) -> str | tuple[tuple[str, str], ...]:
    """Read one name, or one for each operation, as a mapping or the pairs that one becomes."""
    if isinstance(value, str):
        return _name(value)
    try:
        by_op = dict(value) if isinstance(value, (Mapping, tuple)) else None
    except (TypeError, ValueError):
        by_op = None
    if by_op is None or len(by_op) < len(value):
        raise TypeError(
            f"jaxcudnn.Options: algorithm must be a string, got {value!r}; write 'measure', or "
            f"{{'wgrad': 'heuristic'}} to choose by operation"
        )
    for op in by_op:
        if op not in OPERATIONS:
            raise ValueError(
                f"jaxcudnn.Options: algorithm by operation must be for {', '.join(OPERATIONS)}, "
                f"got {op!r}"
            )
    return tuple((str.__str__(op), _name(name)) for op, name in sorted(by_op.items()))


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"jaxcudnn.Options: algorithm must be a string, got {name!r}")
    if name not in ALGORITHMS and not _PLAN.fullmatch(name):
        raise ValueError(
            f"jaxcudnn.Options: algorithm must be one of {', '.join(ALGORITHMS)} or a plan's "
            f"name, got {name!r}; jaxcudnn.plans lists the names"
        )
    return str.__str__(name)


def _int(name: str, value: Any, *, minimum: int, of: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError("a truth value")
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"jaxcudnn.{of}: {name} must be an integer, got {value!r}") from error
    if not minimum <= number < 2**63:
        raise ValueError(f"jaxcudnn.{of}: {name} must be at least {minimum}, got {value!r}")
    return number


def _milliseconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"jaxcudnn.TuningBudget: {name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if not 0 < number < float("inf"):
        raise ValueError(
            f"jaxcudnn.TuningBudget: {name} must be positive and finite, got {value!r}; "
            f"algorithm='heuristic' measures nothing"
        )
    return number


def _engines(engines: Any) -> tuple[str, ...]:
    if isinstance(engines, str) or not isinstance(engines, (tuple, list, set, frozenset)):
        raise TypeError(
            f"jaxcudnn.Options: exclude_engines must be a tuple of names, got {engines!r}; write "
            f"('eng57',)"
        )
    for engine in engines:
        if not (isinstance(engine, str) and _ENGINE.fullmatch(engine)):
            raise ValueError(
                f"jaxcudnn.Options: exclude_engines must hold engines' names, got {engine!r}; "
                f"write 'eng57', which leaves out all of its plans"
            )
    names = {str.__str__(engine) for engine in engines}
    return tuple(sorted(names, key=lambda engine: (len(engine), engine)))


def _routes(routes: Any) -> tuple[str, ...]:
    if isinstance(routes, (bool, np.bool_)):
        return ROUTES if routes else ()
    if isinstance(routes, str) or not isinstance(routes, (tuple, list, set, frozenset)):
        raise TypeError(
            f"jaxcudnn.Options: routes must be True, False or a tuple of names, got {routes!r}; "
            f"write ('matmul',)"
        )
    known = (*ROUTES, *INEXACT_ROUTES)
    for route in routes:
        if route not in known:
            raise ValueError(
                f"jaxcudnn.Options: routes must be among {', '.join(known)}, got {route!r}; write "
                f"False for none"
            )
    return tuple(route for route in known if route in routes)
