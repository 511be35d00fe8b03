# SPDX-License-Identifier: Apache-2.0
"""The whole examination: facts are gathered in an order that lets each be seen, then judged."""

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

from . import _doctor_checks as checks
from . import _doctor_facts as facts
from . import _doctor_settings as settings
from . import _load, _options, _self_test
from ._doctor_finding import Fault, Finding


def examine() -> list[Finding]:
    """Look at everything. JAX is started, and a small convolution is computed."""
    gpus = facts.start_jax()
    before = facts.mapped()  # so with JAX's libraries
    platforms = facts.platforms()
    versions = facts.versions()
    plugins = facts.plugins(versions)
    wanted = bool(gpus.devices) or (bool(plugins) and facts.wants_cuda(platforms))
    findings = [
        *checks.check_versions(versions),
        checks.check_extension(_load.native, facts.ffi_of_jaxlib()),
        *checks.check_gpus(gpus, facts.driver(), versions, platforms),
    ]
    native = _native()
    cudnn = native and facts.cudnn(native, before, plugins)
    if cudnn:
        findings.append(checks.check_cudnn(cudnn, versions, wanted=wanted))
    libraries = {
        name: facts.library([f"{name}.so.{major}" for major in checks.majors(versions)], before)
        for name in checks.LIBRARIES
    }
    for name, library in libraries.items():
        findings.append(checks.check_library(name, library, versions, wanted=wanted))
    findings += settings.check_variables(os.environ)
    findings += settings.check_options(_options.current, os.environ)
    findings += _store()
    if native and cudnn and cudnn.library:
        known = native.known_faults(
            sm=facts.compute_capability(gpus),
            cudnn=cudnn.version,
            cublaslt=facts.cublaslt_version(libraries["libcublasLt"]),
        )
        findings += [Finding("not used", str(row)) for row in known]
    findings.append(check_self_test(lambda: _self_test.wrong(*gpus.devices[:1]), gpus.devices))
    return findings


def check_self_test(wrong: Callable[[], Sequence[str]], devices: Sequence[object]) -> Finding:
    """Report whether a convolution is computed as it is defined.

    Args:
      wrong: says what is wrong, or raises RuntimeError.
      devices: the GPUs, on the first of which it ran.
    """
    where = "cuDNN" if devices else "XLA on the CPU"
    try:
        said = wrong()
    except RuntimeError as error:
        said = [str(error).strip().splitlines()[0]]
    if not said:
        return Finding("self-test", f"passed: forward and both gradients, by {where}")
    remedy = "remedy the faults above first; if there is none, please report this output"
    faults = tuple(Fault(text, remedy) for text in said)
    return Finding("self-test", f"failed, by {where}", faults)


def _native() -> ModuleType | None:
    try:
        return _load.native()
    except RuntimeError:
        return None


def _store() -> list[Finding]:
    try:
        store = import_module(".store", __package__)
    except ImportError:
        return []
    return [settings.check_store(store.path, store.info)]
