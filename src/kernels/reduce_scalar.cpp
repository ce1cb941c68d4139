#define LOCKSTEP_ISA scalar
#include "kernels/reduce_body.hpp"
