# Every header compiles alone: a translation unit for each that includes it and nothing else. Only
# when ./dev lint asks for them.
function(headers_alone target)
  add_library(${target} OBJECT EXCLUDE_FROM_ALL)
  target_compile_options(${target} PRIVATE -O0)
  foreach(header ${ARGN})
    string(MAKE_C_IDENTIFIER ${header} name)
    file(CONFIGURE OUTPUT headers/${name}.cpp CONTENT "#include \"${header}\"\n")
    target_sources(${target} PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/headers/${name}.cpp)
  endforeach()
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src)
endfunction()

file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/include
     ${PROJECT_SOURCE_DIR}/include/*.hpp)
file(GLOB_RECURSE private_headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/src
     ${PROJECT_SOURCE_DIR}/src/*.hpp)
# These need nanobind or torch, which pip brings, and an MPI.
list(FILTER private_headers EXCLUDE REGEX "^(python|nn/backend|nn/torch_extension|engines/[a-z]+/module)/")
list(APPEND headers ${private_headers})
set(nn_headers ${headers})
list(FILTER headers EXCLUDE REGEX "^(lockstep/)?nn[/.]")
list(FILTER nn_headers INCLUDE REGEX "^(lockstep/)?nn[/.]")
list(REMOVE_ITEM nn_headers nn/pch.hpp)

headers_alone(headers_alone ${headers})
target_link_libraries(headers_alone PRIVATE lockstep fmt::fmt)
if(TARGET lockstep_nn)
  headers_alone(headers_alone_nn ${nn_headers})
  target_link_libraries(headers_alone_nn PRIVATE lockstep_nn fmt::fmt)
endif()
