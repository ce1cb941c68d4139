// Precompiled: a translation unit with libtorch's headers costs twice as much without it.
#include <torch/torch.h>
