// On a machine whose memory is nearer to some processors than to others, a thread runs where what it works on lies.
#pragma once

namespace elixir {

/// The node that the page at `address` lies on; -1 where there is one node only, or the system does not tell.
int node_of(const void* address) noexcept;

/// Keeps the calling thread on those of its processors that belong to the node of `address`, if there are any.
void run_near(const void* address) noexcept;

}  // namespace elixir
