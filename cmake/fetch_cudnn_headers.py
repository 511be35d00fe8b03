# SPDX-License-Identifier: Apache-2.0
"""Put cuDNN's headers into FOLDER/include: `python fetch_cudnn_headers.py FOLDER`.

They come from a wheel on the package index that pip is configured for. The wheel is downloaded
without what it requires at run time (cuBLAS, 400 MB), which a build requirement cannot leave out.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = (
    "nvidia-cudnn-jit-cu13==9.19.0.56"
    " --hash=sha256:0cb5672fc29f22a6107f0ce48cc195e0d580e8ec4566ee6f3589eb8cc15aa9ff"  # x86_64
    " --hash=sha256:ce05845b511f6aa874ad2a1804da8872405cfaa8fed5c86d24b1f2337fe0d50e\n"  # aarch64
)
HEADERS = "nvidia/cudnn_jit/include/"


def fetch(folder: Path) -> Path:
    """Download the wheel and unpack its headers; returns the folder that holds cudnn.h.

    Headers that an earlier build left there are kept as they are.

    Raises:
      subprocess.CalledProcessError: pip could not download the wheel.
    """
    include = folder / "include"
    if (include / "cudnn.h").is_file():
        return include
    with tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch, "requirements.txt")
        requirements.write_text(REQUIREMENT)
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, "-r", requirements, "-d", scratch],
            check=True,
        )
        (wheel,) = Path(scratch).glob("*.whl")
        # Unpacked beside and renamed, so that an interrupted run leaves no half-filled folder.
        unpacked = folder / "partial"
        unpacked.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith(HEADERS) and name.endswith(".h"):
                    (unpacked / Path(name).name).write_bytes(archive.read(name))
        unpacked.rename(include)
    return include


def main() -> int:
    """Command line; the last line of standard output is the folder that holds cudnn.h."""
    if len(sys.argv) != 2:
        print(f"usage: {Path(__file__).name} FOLDER", file=sys.stderr)
        return 2
    try:
        print(fetch(Path(sys.argv[1])))
    except subprocess.CalledProcessError:
        print(
            "cuDNN's headers could not be downloaded from the package index; "
            "reach it, or name a folder with cudnn.h by -DCUDNN_INCLUDE_DIR=...",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
