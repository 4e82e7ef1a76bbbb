// BLAKE2b (RFC 7693, no key, digests of 32 bytes) of many messages of one length that lie one behind the other.
//
// One message's blocks depend on each other, so messages go side by side instead, one in each lane. Knows nothing of
// Python; arrays are plain pointers, at any alignment; nothing is allocated.
#pragma once

#include <cstddef>
#include <cstdint>

#include "adam.hpp"

namespace elixir {

constexpr std::size_t kBlake2bBlock = 128;
constexpr std::size_t kBlake2bDigest = 32;

/// Hashes `count` messages of `length` bytes each, a multiple of kBlake2bBlock and not 0; writes their digests in
/// order. `isa` must be no better than best_isa(); the result is the same.
void blake2b(const std::uint8_t* messages, std::size_t count, std::size_t length, std::uint8_t* digests, Isa isa);

}  // namespace elixir
