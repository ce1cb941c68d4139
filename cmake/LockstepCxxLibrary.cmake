# libtorch has the C++ library as a shared one. A compiler that puts a second, static one into our libraries makes
# programs that crash in their streams.
set(lockstep_probe ${CMAKE_CURRENT_BINARY_DIR}/shared_cxx_library)
file(WRITE ${lockstep_probe}.cpp "#include <iostream>\nvoid probe() { std::cout << 1; }\n")
separate_arguments(lockstep_flags UNIX_COMMAND
  "${CMAKE_CXX_FLAGS} ${CMAKE_MODULE_LINKER_FLAGS} ${CMAKE_SHARED_LINKER_FLAGS}")
execute_process(COMMAND ${CMAKE_CXX_COMPILER} ${lockstep_flags} -shared -fPIC ${lockstep_probe}.cpp
                        -o ${lockstep_probe}.so
                COMMAND_ERROR_IS_FATAL ANY)
file(STRINGS ${lockstep_probe}.so lockstep_found REGEX "^lib(std)?c\\+\\+\\.so")
if(NOT lockstep_found)
  message(FATAL_ERROR "${CMAKE_CXX_COMPILER} links the C++ library statically into shared libraries, and libtorch has "
                      "it as a shared one: two in one process crash. Set CXX to another compiler (CXX=/usr/bin/g++)")
endif()
