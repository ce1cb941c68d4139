#define LOCKSTEP_ISA scalar
#include "kernels/batch_norm_body.hpp"
