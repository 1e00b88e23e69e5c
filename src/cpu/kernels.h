// The kernels of this build, a table per instruction set.
#pragma once

#include "cpu/job.h"

namespace flashattn::cpu {

namespace baseline {
const Kernels& kernels();
}
namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}
namespace avx512_bf16 {
const Kernels& kernels();
}
namespace avx512_amx {
const Kernels& kernels();
}
namespace neon {
const Kernels& kernels();
}
namespace sve {
const Kernels& kernels();
}
namespace neon_bf16 {
const Kernels& kernels();
}

}  // namespace flashattn::cpu
