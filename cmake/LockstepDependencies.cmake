# What lockstep is compiled with, other than a compiler: the system's or, where pip builds the Python package, its build
# requirements (pyproject.toml).
if(SKBUILD)
  foreach(folder IN LISTS CMAKE_PREFIX_PATH)
    if(EXISTS ${folder}/cmeel.prefix)  # of cmeel-fmt, cmeel-cereal
      list(PREPEND CMAKE_PREFIX_PATH ${folder}/cmeel.prefix)
    endif()
    # The package nlohmann-json has headers alone.
    if(EXISTS ${folder}/nlohmann_json/include/nlohmann/json.hpp AND NOT TARGET nlohmann_json::nlohmann_json)
      add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED)
      target_include_directories(nlohmann_json::nlohmann_json INTERFACE ${folder}/nlohmann_json/include)
      set(nlohmann_json_FOUND TRUE)
    endif()
  endforeach()
endif()

find_package(Threads REQUIRED)
find_package(fmt QUIET)
find_package(cereal QUIET)
if(NOT nlohmann_json_FOUND)
  find_package(nlohmann_json QUIET)
endif()
if(LOCKSTEP_BUILT)
  # Only the command needs them.
  set(CLI11_FOUND TRUE)
  set(Sodium_FOUND TRUE)
else()
  find_package(CLI11 QUIET)
  find_package(Sodium QUIET)
endif()

set(lockstep_missing "")
foreach(package libfmt-dev=fmt libcereal-dev=cereal nlohmann-json3-dev=nlohmann_json libcli11-dev=CLI11
                libsodium-dev=Sodium)
  string(REPLACE "=" ";" package ${package})
  list(GET package 1 name)
  if(NOT ${name}_FOUND)
    list(GET package 0 package)
    string(APPEND lockstep_missing " ${package}")
  endif()
endforeach()
if(lockstep_missing)
  message(FATAL_ERROR "lockstep is compiled with libraries that CMake does not find here. Install, by Debian's and Ubuntu's "
                      "names:${lockstep_missing}; or name their prefix in CMAKE_PREFIX_PATH")
endif()
