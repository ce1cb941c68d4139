# lockstep_shared: the core as liblockstep.so, for what loads several parts of lockstep into one process
# (the extensions of the Python package), which must share one world and one set of exception types.
# It is linked from the objects of the static library.
file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/liblockstep.cpp CONTENT "")
add_library(lockstep_shared SHARED ${CMAKE_CURRENT_BINARY_DIR}/liblockstep.cpp)
set_target_properties(lockstep_shared PROPERTIES
  OUTPUT_NAME lockstep
  LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/liblockstep.map)
target_include_directories(lockstep_shared INTERFACE ${PROJECT_SOURCE_DIR}/include)
target_compile_features(lockstep_shared INTERFACE cxx_std_20)
target_link_libraries(lockstep_shared
  PRIVATE $<LINK_LIBRARY:WHOLE_ARCHIVE,lockstep> ${LOCKSTEP_FMT} ${CMAKE_DL_LIBS}
  INTERFACE Threads::Threads cereal::cereal nlohmann_json::nlohmann_json)
# Calls within the library are direct; what is not lockstep's stays in it.
target_link_options(lockstep_shared PRIVATE
  LINKER:-Bsymbolic-functions LINKER:--no-undefined
  LINKER:--version-script=${CMAKE_CURRENT_SOURCE_DIR}/liblockstep.map)
