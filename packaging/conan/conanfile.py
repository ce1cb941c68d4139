import os
import re

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load

required_conan_version = ">=2.0"


class LockstepConan(ConanFile):
    name = "lockstep"
    license = "Apache-2.0"
    description = "Distributed training in C++ that equals one device, or says who stopped"
    topics = ("distributed", "collectives", "mpi", "training")
    settings = "os", "compiler", "build_type", "arch"
    options = {"system_libraries": [True, False]}
    # True: fmt, cereal, nlohmann-json, CLI11 and libsodium of the system, so that nothing is downloaded.
    default_options = {"system_libraries": False}

    @property
    def _root(self):
        return os.path.join(self.recipe_folder, "..", "..")

    def set_version(self):
        text = load(self, os.path.join(self._root, "CMakeLists.txt"))
        self.version = re.search(r"project\(lockstep VERSION ([0-9.]+)", text).group(1)

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "cmake/*", "include/*", "packaging/copyright", "src/*"):
            copy(self, pattern, self._root, self.export_sources_folder)

    def requirements(self):
        if self.options.system_libraries:
            return
        self.requires("fmt/[>=9 <12]", transitive_headers=False)
        self.requires("cereal/[>=1.3 <2]", transitive_headers=True)
        self.requires("nlohmann_json/[>=3.11 <4]", transitive_headers=True)
        self.requires("cli11/[>=2.3 <3]", visible=False)
        self.requires("libsodium/[>=1.0.18 <2]", visible=False)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        for name in ("NN", "TESTS", "EXAMPLES", "BENCH"):
            toolchain.cache_variables[f"LOCKSTEP_{name}"] = False
        toolchain.cache_variables["CMAKE_UNITY_BUILD"] = True
        toolchain.cache_variables["CMAKE_UNITY_BUILD_BATCH_SIZE"] = 12
        toolchain.generate()
        CMakeDeps(self).generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        for name in ("LICENSE", "packaging/copyright"):
            copy(self, name, self.source_folder, os.path.join(self.package_folder, "licenses"))
        CMake(self).install()

    def package_info(self):
        # The package's own CMake files, which know the components.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("lib", "cmake", "lockstep")]
        self.cpp_info.libs = ["lockstep"]
        self.buildenv_info.prepend_path("PATH", os.path.join(self.package_folder, "bin"))
        self.runenv_info.prepend_path("PATH", os.path.join(self.package_folder, "bin"))
