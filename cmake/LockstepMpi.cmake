# lockstep_mpi_target(TARGET MPI): what a target compiled against openmpi or mpich needs. Both are
# here at once, so neither is asked for by FindMPI, which knows one.
set(lockstep_openmpi_header lib/${CMAKE_LIBRARY_ARCHITECTURE}/openmpi/include)
set(lockstep_openmpi_library mpi openmpi/lib)
set(lockstep_mpich_header include/${CMAKE_LIBRARY_ARCHITECTURE}/mpich)
set(lockstep_mpich_library mpich "")

foreach(mpi openmpi mpich)
  list(GET lockstep_${mpi}_library 0 name)
  list(GET lockstep_${mpi}_library 1 folder)
  find_path(LOCKSTEP_${mpi}_INCLUDE mpi.h PATH_SUFFIXES ${lockstep_${mpi}_header} NO_CACHE)
  find_library(LOCKSTEP_${mpi}_LIBRARY ${name} PATH_SUFFIXES ${folder} NO_CACHE)
  if(LOCKSTEP_${mpi}_INCLUDE AND LOCKSTEP_${mpi}_LIBRARY)
    list(APPEND LOCKSTEP_MPIS ${mpi})
  else()
    message(STATUS "No ${mpi}: neither its module of the mpi engine nor its peer of "
                   "bench/compare is built")
  endif()
endforeach()

function(lockstep_mpi_target target mpi)
  target_compile_definitions(${target} PRIVATE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_include_directories(${target} SYSTEM PRIVATE ${LOCKSTEP_${mpi}_INCLUDE})
  target_link_libraries(${target} PRIVATE ${LOCKSTEP_${mpi}_LIBRARY})
endfunction()

# Defines OPENMPI_MODULE and MPICH_MODULE, each empty where that module is not built.
function(lockstep_tell_mpi_modules target)
  foreach(mpi openmpi mpich)
    string(TOUPPER ${mpi} name)
    set(module "")
    if(TARGET lockstep_mpi_${mpi})
      add_dependencies(${target} lockstep_mpi_${mpi})
      set(module "$<TARGET_FILE:lockstep_mpi_${mpi}>")
    endif()
    target_compile_definitions(${target} PRIVATE ${name}_MODULE="${module}")
  endforeach()
endfunction()
