# lockstep_torch: the libtorch that the nn layer is built on: headers (as the system's, so that our
# warnings do not speak of them), flags and libraries. Used by this build and, installed, by
# find_package(lockstep COMPONENTS nn).
if(TARGET lockstep_torch)
  return()
endif()

# Targets that a project which adds lockstep as a folder sees too.
set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)
if(LOCKSTEP_TORCH_DIR)
  # A libtorch's own prefix, or what torch.utils.cmake_prefix_path says. Its package looks for its
  # parts among the system's first, unless its prefix leads CMAKE_PREFIX_PATH.
  set(lockstep_prefix_path ${CMAKE_PREFIX_PATH})
  list(PREPEND CMAKE_PREFIX_PATH ${LOCKSTEP_TORCH_DIR} ${LOCKSTEP_TORCH_DIR}/../..)
  find_package(Torch REQUIRED NO_DEFAULT_PATH PATHS ${LOCKSTEP_TORCH_DIR})
  set(CMAKE_PREFIX_PATH ${lockstep_prefix_path})
  cmake_path(IS_PREFIX TORCH_INSTALL_PREFIX "${TORCH_LIBRARY}" NORMALIZE lockstep_torch_is_whole)
  if(NOT lockstep_torch_is_whole)
    message(FATAL_ERROR
      "LOCKSTEP_TORCH_DIR is ${LOCKSTEP_TORCH_DIR}, but the library found is ${TORCH_LIBRARY}. "
      "Another libtorch was configured here before: begin with an empty build directory.")
  endif()
else()
  find_package(Torch QUIET)
  if(NOT Torch_FOUND)
    message(FATAL_ERROR
      "No libtorch found. Install it (Debian: libtorch-dev), or give the prefix of another with "
      "-DLOCKSTEP_TORCH_DIR=DIR, or build lockstep without its libtorch layer: -DLOCKSTEP_NN=OFF.")
  endif()
endif()
unset(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL)

if(TORCH_CXX_FLAGS MATCHES "_GLIBCXX_USE_CXX11_ABI=0")
  message(FATAL_ERROR
    "The libtorch in ${TORCH_INSTALL_PREFIX} is built with the C++ library's old ABI "
    "(${TORCH_CXX_FLAGS}), which lockstep's other dependencies are not. Take its cxx11-abi build.")
endif()

add_library(lockstep_torch INTERFACE IMPORTED GLOBAL)
target_link_libraries(lockstep_torch INTERFACE ${TORCH_LIBRARIES})
target_include_directories(lockstep_torch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
separate_arguments(lockstep_torch_flags UNIX_COMMAND "${TORCH_CXX_FLAGS}")
target_compile_options(lockstep_torch INTERFACE ${lockstep_torch_flags})
# Another libtorch's headers may bring an fmt of their own, which comes before the system's, but no
# library of it.
foreach(dir IN LISTS TORCH_INCLUDE_DIRS)
  if(LOCKSTEP_TORCH_DIR AND EXISTS ${dir}/fmt/format.h)
    target_compile_definitions(lockstep_torch INTERFACE FMT_HEADER_ONLY)
    break()
  endif()
endforeach()
