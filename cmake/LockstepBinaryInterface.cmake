# lockstep_stamp(ROOT HEADERS RESULT): 16 hexadecimal digits of these headers, paths in ROOT, without their comments.
function(lockstep_stamp root headers result)
  list(SORT headers)
  set(hashes "")
  foreach(header IN LISTS headers)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${root}/${header})
    file(READ ${root}/${header} text)
    string(REGEX REPLACE "[ \n]*//[^\n]*" "" text "${text}")
    string(SHA256 hash "${text}")
    string(APPEND hashes "${header} ${hash}\n")
  endforeach()
  string(SHA256 stamp "${hashes}")
  string(SUBSTRING ${stamp} 0 16 stamp)
  set(${result} ${stamp} PARENT_SCOPE)
endfunction()

# lockstep_binary_interface(ROOT RESULT): a stamp of the headers in ROOT that lockstep-dist and lockstep-torch are both
# compiled with. What is compiled with others must not be loaded into one process.
function(lockstep_binary_interface root result)
  set(patterns ${root}/include/lockstep/*.hpp ${root}/src/python/core_api.hpp)
  foreach(module base kernels record group engines world dist sync)
    list(APPEND patterns ${root}/src/${module}/*.hpp ${root}/src/${module}/*.inc)
  endforeach()
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE ${root} ${patterns})
  list(FILTER headers EXCLUDE REGEX "^include/lockstep/nn[/.]")
  lockstep_stamp(${root} "${headers}" stamp)
  set(${result} ${stamp} PARENT_SCOPE)
endfunction()

# lockstep_layout_version(ROOT RESULT): a number of the headers in ROOT that describe the memory and files that
# processes share. A process does not use those of another number.
function(lockstep_layout_version root result)
  lockstep_stamp(${root} "src/base/cpus.hpp;src/engines/shared/segment/layout.hpp;src/engines/shared/segment/tuning.hpp;\
src/group/failure.hpp;src/record/flight_record.hpp" stamp)
  string(SUBSTRING ${stamp} 0 8 stamp)
  set(${result} 0x${stamp} PARENT_SCOPE)
endfunction()
