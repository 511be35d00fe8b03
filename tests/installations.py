# SPDX-License-Identifier: Apache-2.0
"""Installations that are not this machine's, for tests of the doctor."""

from types import SimpleNamespace

from jaxcudnn._doctor_facts import Cudnn, Library

VERSIONS = {
    "jaxcudnn": "0.1.0",
    "jax": "0.11.2",
    "jaxlib": "0.11.2",
    "jax-cuda13-plugin": "0.11.2",
    "jax-cuda13-pjrt": "0.11.2",
}
CPU_VERSIONS = {name: VERSIONS[name] for name in ("jaxcudnn", "jax", "jaxlib")}
CUDA12 = {name.replace("13", "12"): version for name, version in VERSIONS.items()}
INSTALL = '`pip install --upgrade "jax[cuda13]==0.11.2" nvidia-cudnn-cu13`'
INSTALL12 = INSTALL.replace("13", "12")


H200 = SimpleNamespace(local_hardware_id=0, device_kind="NVIDIA H200", compute_capability="9.0")

WHEEL = Library("/wheels/libcudnn.so.9", "from NVIDIA's wheels")
FOUND = Cudnn(WHEEL, version=91900, oldest=90800, compiled=92700, plugin=91200)


def faults(*findings):
    return [fault for finding in findings for fault in finding.faults]
