# The toolchain of the preset `arm64`: Debian's cross compiler, and qemu to run what it makes.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
# Of these only headers are used, so those of this machine's packages will do.
foreach(package fmt cereal)
  file(GLOB ${package}_DIR /usr/lib/*/cmake/${package})
endforeach()
file(GLOB SODIUM_LIBRARY /usr/lib/*/libsodium.a)
