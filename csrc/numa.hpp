// NUMA: runs a thread on processors near the memory it works on.
#pragma once

namespace elixir {

/// The NUMA node of the page at `address`; -1 if there is only one node, or the system does not tell.
int node_of(const void* address) noexcept;

/// Restricts the calling thread to those of its processors that belong to the node of `address`, if there are any.
void run_near(const void* address) noexcept;

}  // namespace elixir
