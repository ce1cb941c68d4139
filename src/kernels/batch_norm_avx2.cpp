#if defined(__x86_64__)
#define LOCKSTEP_ISA avx2
#include "kernels/batch_norm_body.hpp"
#endif
