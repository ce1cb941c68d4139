#!/usr/bin/env python3
"""Do the recipes of packaging/, pyproject.toml and the Debian packages fit CMakeLists.txt: version, licenses, the packages
that CMake looks for, the options that they set? ./dev lint runs it."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A package that the core's CMake files look for: what vcpkg, Conan and Debian call it.
NAMES = {
    "fmt": ("fmt", "fmt", "libfmt-dev"),
    "cereal": ("cereal", "cereal", "libcereal-dev"),
    "nlohmann_json": ("nlohmann-json", "nlohmann_json", "nlohmann-json3-dev"),
    "CLI11": ("cli11", "cli11", "libcli11-dev"),
    "Sodium": ("libsodium", "libsodium", "libsodium-dev"),
}
# Of the compiler; of the libtorch layer; of the Python package.
OTHERS = {"Threads", "Torch", "Python", "nanobind"}
# Of these, what binaries contain besides NAMES: nanobind, with the library that it brings.
CONTAINED = {"nanobind", "robin-map"}

complaints = []


def text_of(name):
    return (ROOT / name).read_text()


def expect(what, found, wanted):
    if found != wanted:
        complaints.append(f"{what}: {found}, expected {wanted}")


cmake = text_of("CMakeLists.txt")
version = re.search(r"project\(lockstep VERSION ([0-9.]+)", cmake)[1]
options = set(re.findall(r"(?:option|set)\((LOCKSTEP_\w+)", cmake))
files = subprocess.run(["git", "ls-files", "CMakeLists.txt", "src/*CMakeLists.txt", "cmake/*.cmake"], cwd=ROOT,
                       check=True, capture_output=True, text=True).stdout.split()
searched = {name for file in files for name in re.findall(r"^[^#\n]*find_package\((\w+)", text_of(file), re.M)} - OTHERS
if searched != set(NAMES):
    sys.exit(f"check_recipes: CMake looks for {sorted(searched)}, and NAMES has {sorted(NAMES)}; add them to the recipes")

# Whoever links the static library finds all of these but what only the command uses.
linked = set(re.findall(r"find_dependency\((\w+)", text_of("cmake/lockstepConfig.cmake.in"))) - OTHERS
expect("cmake/lockstepConfig.cmake.in: find_dependency", sorted(linked), sorted(searched - {"CLI11", "Sodium"}))
depends = re.search(r"DEBIAN_DEV_PACKAGE_DEPENDS\s+\"([^\"]*)\"", text_of("cmake/LockstepPackages.cmake"))[1]
expect("cmake/LockstepPackages.cmake: -dev packages that liblockstep-dev needs",
       sorted(name for name in re.split(r"[ ,]+", depends) if name.endswith("-dev")),
       sorted(NAMES[name][2] for name in linked))

# The version stands in CMakeLists.txt; where it has to be written again, it is compared.
macros = [re.search(rf"LOCKSTEP_VERSION_{part} (\d+)", text_of("include/lockstep/lockstep.h"))[1]
          for part in ("MAJOR", "MINOR", "PATCH")]
expect("include/lockstep/lockstep.h: LOCKSTEP_VERSION_", ".".join(macros), version)
minor = version.rpartition(".")[0]
found = subprocess.run(["git", "grep", "-nE", r"find_package\(lockstep [0-9]"], cwd=ROOT, check=True, capture_output=True,
                       text=True).stdout.splitlines()
expect(f"find_package(lockstep ...) of another version than {minor}",
       [line for line in found if f"find_package(lockstep {minor}" not in line], [])
if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", text_of("CHANGELOG.md"), re.M):
    complaints.append(f"CHANGELOG.md: no heading '## [{version}] - YYYY-MM-DD'")

port = json.loads(text_of("packaging/vcpkg/lockstep/vcpkg.json"))
expect("packaging/vcpkg: version", port["version-semver"], version)
expect("packaging/vcpkg: license", port["license"], "Apache-2.0")
expect("packaging/vcpkg: dependencies", sorted(name for name in port["dependencies"] if isinstance(name, str)),
       sorted(NAMES[name][0] for name in searched))

recipe = text_of("packaging/conan/conanfile.py")
expect("packaging/conan: license", re.findall(r'license = "(.*)"', recipe), ["Apache-2.0"])
expect("packaging/conan: requirements", sorted(re.findall(r'requires\("(\w+)/', recipe)),
       sorted(NAMES[name][1] for name in searched))

front = re.search(r"build_packages=\(([^)]*)\)", text_of("scripts/packages.conf"))[1].split()
expect("scripts/packages.conf: build_packages without", sorted({NAMES[name][2] for name in searched} - set(front)), [])

# The Python packages, and what pip brings to build the first; the index has neither CLI11 nor libsodium.
PYTHON = {"fmt": "cmeel-fmt", "cereal": "cmeel-cereal", "nlohmann_json": "nlohmann-json"}
for name in ("pyproject.toml", "python/torch/pyproject.toml"):
    expect(f"{name}: license", re.findall(r'^license = "(.*)"', text_of(name), re.M), ["Apache-2.0"])
required = re.search(r"^requires = \[(.*?)^\]", text_of("pyproject.toml"), re.M | re.S)[1]
missing = sorted({PYTHON[name] for name in linked} - set(re.findall(r'"([\w-]+)"', required)))
expect("pyproject.toml: build requirements without", missing, [])

# What is compiled into the binaries has its notice and the text of its license, and every package brings these.
notices = text_of("packaging/copyright")
expect("packaging/copyright: libraries", sorted({name.lower() for name in re.findall(r"^Files: ([\w-]+)/\*$", notices, re.M)}),
       sorted({NAMES[name][0] for name in searched} | CONTAINED))
expect("packaging/copyright: licenses with their text", sorted(re.findall(r"^License: (\S+)\n ", notices, re.M)),
       sorted(set(re.findall(r"^License: (\S+)$", notices, re.M))))
for name, file in (("pyproject.toml", "packaging/copyright"), ("python/torch/pyproject.toml", "copyright")):
    expect(f"{name}: license-files", re.findall(r"^license-files = (\[.*\])$", text_of(name), re.M), [f'["LICENSE", "{file}"]'])

for name in ("packaging/vcpkg/lockstep/portfile.cmake", "packaging/conan/conanfile.py", "pyproject.toml",
             "scripts/clean_root.sh", "docs/packages.md"):
    used = set(re.findall(r"\bLOCKSTEP_[A-Z]+\b", text_of(name)))
    used |= {f"LOCKSTEP_{part}" for group in re.findall(r"LOCKSTEP_\{([A-Z,]+)\}", text_of(name))
             for part in group.split(",")}
    expect(f"{name}: options that CMakeLists.txt lacks", sorted(used - options - {"LOCKSTEP_MPI"}), [])
for part in re.findall(r'for name in \(([^)]*)\)', recipe)[0].replace('"', "").split(", "):
    expect("packaging/conan: an option", f"LOCKSTEP_{part}" in options, True)

print("\n".join(complaints) if complaints else f"recipes fit version {version}")
sys.exit(1 if complaints else 0)
