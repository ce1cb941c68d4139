# Bodies compiled once per instruction set: X_body.hpp by X_scalar.cpp, X_avx2.cpp, X_avx512.cpp.
# No contraction anywhere, so that all give the same bits.
set(isa_scalar "")
set(isa_avx2 -mavx2 -mf16c -mprfchw)
set(isa_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c -mprfchw -mprefer-vector-width=512)
foreach(isa scalar avx2 avx512)
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*_${isa}.cpp)
  if(isa STREQUAL scalar OR CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    set_property(SOURCE ${sources} APPEND PROPERTY COMPILE_OPTIONS
                 -ffp-contract=off -fno-math-errno -fno-trapping-math
                 $<$<NOT:$<CONFIG:Debug>>:-O3> ${isa_${isa}})
  endif()
endforeach()
set_property(SOURCE ${CMAKE_CURRENT_LIST_DIR}/batch_norm.cpp APPEND PROPERTY COMPILE_OPTIONS -ffp-contract=off)
