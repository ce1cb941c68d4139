# CTest runs a binary as shards, processes of their own (shard N of core_tests is core_tests.N): most tests wait for
# launchers, deadlines and each other, so that more shards than cores are done sooner, and the more of them, the more
# evenly they end. A test each would cost 1,800 processes of the core, and load libtorch for 0.6 s as often.
include(ProcessorCount)
ProcessorCount(n_cores)
math(EXPR LOCKSTEP_SHARDS "2 * (${n_cores} + 1)")
set(LOCKSTEP_TEST_LAUNCHER "" CACHE STRING "What the tests run under, as valgrind")
set(shard_launcher ${CMAKE_CROSSCOMPILING_EMULATOR})
if(CMAKE_CXX_FLAGS MATCHES "sanitize=thread")
  # ThreadSanitizer of older compilers cannot map its shadow under much address randomisation.
  execute_process(COMMAND setarch -R true RESULT_VARIABLE failed ERROR_QUIET)
  if(NOT failed)
    set(shard_launcher setarch -R)
  endif()
endif()
# Two mpiruns of Open MPI that make their common session folder at once fail: each shard has one of its own, in /tmp
# because a build may lie on a network.
string(SHA1 shard_sessions ${PROJECT_BINARY_DIR})
string(SUBSTRING ${shard_sessions} 0 8 shard_sessions)
function(lockstep_add_shards target n_shards) # [VARIABLE=VALUE...]
  math(EXPR last "${n_shards} - 1")
  foreach(shard RANGE ${last})
    add_test(NAME ${target}.${shard} COMMAND ${shard_launcher} ${LOCKSTEP_TEST_LAUNCHER} $<TARGET_FILE:${target}>)
    set_tests_properties(${target}.${shard} PROPERTIES ENVIRONMENT
      "GTEST_TOTAL_SHARDS=${n_shards};GTEST_SHARD_INDEX=${shard};OMPI_MCA_orte_tmpdir_base=/tmp/mpi-${shard_sessions}/${target}.${shard};${ARGN}")
  endforeach()
endfunction()
