// The one file that knows both Python and the kernels: arrays are constrained here, never converted.

#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_native, m) { m.doc() = "Kernels of elixir_moe that know neither Python nor torch."; }
