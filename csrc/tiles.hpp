// Matrix tiles (AMX) of a CPU.
#pragma once

namespace elixir {

/// Whether the CPU announces tiles and does not describe them, as under a hypervisor that hides their page of the
/// processor's data sheet: who sets them up by what he reads there is killed by the first instruction that uses one.
bool tiles_trap() noexcept;

}  // namespace elixir
