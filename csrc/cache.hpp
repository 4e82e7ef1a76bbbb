// The rCache without its memory: simulates a recorded step and decides which chunk leaves when another must enter.
//
// The decisions are those of `CacheState` in chunks/cache_policy.py with a schedule and without prefetch; the runtime
// uses `CacheState`. A test compares the two load by load. The search simulates hundreds of steps.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace elixir {

enum class Verb : std::uint8_t { acquire = 0, release = 1 };

struct Schedule {
    const std::uint8_t* verbs;
    const std::int32_t* starts;  // entries + 1: where the chunks of each entry begin
    const std::int32_t* chunks;  // weights by their chunk; the gradients of chunk c are number chunk_count + c
    std::size_t entries;
    std::int32_t chunk_count;  // one more than the largest chunk
};

struct Load {
    std::int32_t chunk;
    std::int32_t block;
    std::int32_t evicted;  // -1: the block was empty
};

// The loads of one step on a cache of `blocks` blocks, empty at first; false if there are too few blocks.
bool simulate(const Schedule& schedule, std::int32_t blocks, std::vector<Load>& loads);

}  // namespace elixir
