"""Build of the native library; everything else is in pyproject.toml.

The library is plain C++ behind a C interface, without Python's headers, so that one file serves every Python version:
it has no version in its name, and a wheel with it is tagged py3-none-<platform>. It is optional: without a compiler, or
on another platform, the package installs without it and runs in PyTorch.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

FOLDER = Path("src/esolm/net/native")
NAME = "esolm.net.native.libesolm_native"


class BuildLibrary(build_ext):
    """A shared library whose name has no Python version, and that exports no module."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so.1"  # not .so, which Python takes for a module

    def get_export_symbols(self, ext: Any) -> list[str]:
        return []


class TagByPlatform(bdist_wheel):
    """The wheel depends on the platform if it has the library, and on no Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, tag = super().get_tag()
        built = next(Path(self.bdist_dir).rglob("libesolm_native.so.1"), None) if self.bdist_dir else None
        return ("py3", "none", tag if built else "any")


library = Extension(
    NAME,
    [str(FOLDER / "native.cpp")],
    depends=[str(path) for path in sorted(FOLDER.glob("*")) if path.suffix in (".h", ".inc")],
    language="c++",
    optional=True,
    extra_compile_args=[
        "-std=c++17", "-O3", "-g0", "-w", "-pthread", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
        "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing",
    ],
    extra_link_args=["-pthread", "-Wl,--as-needed"],
)  # fmt: skip
supported = sys.platform == "linux" and platform.machine().lower() in ("x86_64", "amd64")

setup(
    ext_modules=[library] if supported else [],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": TagByPlatform},
)
