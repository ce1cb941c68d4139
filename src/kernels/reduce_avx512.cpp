#if defined(__x86_64__)
#define LOCKSTEP_ISA avx512
#include "kernels/reduce_body.hpp"
#endif
