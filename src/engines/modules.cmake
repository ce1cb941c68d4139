# What an engine loads at run time, because the core links no library of its own for it: engines/*/module.
add_custom_target(lockstep_modules)

# lockstep_engine_module(ENGINE LIBRARY SOURCE...): liblockstep-ENGINE-LIBRARY.so, the module of the engine for that
# library, and target lockstep_ENGINE_LIBRARY; liblockstep-ENGINE.so and lockstep_ENGINE where both have one name. It is
# in the Python package, and a package of its own.
function(lockstep_engine_module engine library)
  set(module lockstep_${engine}_${library})
  if(engine STREQUAL library)
    set(module lockstep_${engine})
  endif()
  string(REPLACE _ - file ${module})
  add_library(${module} MODULE ${ARGN})
  set_target_properties(${module} PROPERTIES OUTPUT_NAME ${file}
                        CXX_VISIBILITY_PRESET hidden)
  target_compile_features(${module} PRIVATE cxx_std_20)
  install(TARGETS ${module} DESTINATION ${CMAKE_INSTALL_LIBDIR}/lockstep COMPONENT ${library})
  add_dependencies(lockstep_modules ${module})
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_MODULES ${module})
endfunction()

file(GLOB lists CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*/module/CMakeLists.txt)
foreach(list ${lists})
  get_filename_component(folder ${list} DIRECTORY)
  add_subdirectory(${folder})
endforeach()
