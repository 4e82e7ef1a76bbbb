// Matrix tiles (AMX) of a CPU.
#pragma once

namespace elixir {

/// Whether the CPU announces tiles but does not describe them, as under a hypervisor that hides their CPUID leaf. A
/// program that configures tiles from that leaf is killed by the first instruction that uses one.
bool tiles_trap() noexcept;

}  // namespace elixir
