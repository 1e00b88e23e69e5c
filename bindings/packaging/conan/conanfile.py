"""conan create bindings/packaging/conan: the C library of this checkout, with the Meson on PATH."""
import pathlib

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd
from conan.tools.files import copy, rm, rmdir
from conan.tools.layout import basic_layout
from conan.tools.meson import Meson, MesonToolchain


class FlashattnConan(ConanFile):
    name = "flashattn"
    version = "0.2.0"
    package_type = "library"
    description = "FlashAttention, forward and backward, behind a C ABI"
    license = "Apache-2.0"
    url = homepage = "https://libflashattn.example"
    topics = ("attention", "transformer", "cuda")
    settings = "os", "arch", "compiler", "build_type"
    # cpu_isas: as in meson_options.txt, with commas; none: the baseline alone.
    options = {"shared": [True, False], "cuda": [True, False], "cpu_isas": ["ANY"]}
    default_options = {"shared": True, "cuda": False,
                       "cpu_isas": "avx2,avx512,avx512_bf16,avx512_amx,neon,sve,neon_bf16"}

    def export_sources(self):
        root = pathlib.Path(self.recipe_folder).resolve().parents[2]
        for pattern in ("src/*", "include/*.h", "meson.build", "meson_options.txt", "LICENSE",
                        "bindings/python/meson.build", "bindings/packaging/cmake/*"):
            copy(self, pattern, src=str(root), dst=self.export_sources_folder)

    def validate(self):
        if self.settings.os != "Linux":
            raise ConanInvalidConfiguration("flashattn is built and tested on Linux alone")
        if self.settings.get_safe("compiler.cppstd"):
            check_min_cppstd(self, 17)

    def layout(self):
        basic_layout(self, src_folder=".")

    def generate(self):
        toolchain = MesonToolchain(self)
        isas = str(self.options.cpu_isas)
        toolchain.project_options["cpu_isas"] = [] if isas == "none" else isas.split(",")
        toolchain.project_options["cuda"] = "enabled" if self.options.cuda else "disabled"
        toolchain.project_options["python"] = "disabled"
        toolchain.generate()

    def build(self):
        meson = Meson(self)
        meson.configure()
        meson.build()

    def package(self):
        package = pathlib.Path(self.package_folder)
        copy(self, "LICENSE", self.source_folder, str(package / "licenses"))
        Meson(self).install()
        # Meson makes both libraries, and Conan's generators write the files of other build systems.
        lib = package / "lib"
        rm(self, "libflashattn.a" if self.options.shared else "libflashattn.so*", str(lib))
        for folder in ("pkgconfig", "cmake"):
            rmdir(self, str(lib / folder))

    def package_info(self):
        self.cpp_info.libs = ["flashattn"]
        target = "flashattn" if self.options.shared else "static"
        self.cpp_info.set_property("cmake_target_name", f"flashattn::{target}")
        self.cpp_info.set_property("pkg_config_name",
                                   "flashattn" if self.options.shared else "flashattn-static")
        if not self.options.shared:
            self.cpp_info.defines = ["FLASHATTN_STATIC"]
            self.cpp_info.system_libs = ["pthread", "stdc++", "m"]
            if self.options.cuda:
                self.cpp_info.system_libs[:0] = ["cudart_static", "dl", "rt"]
