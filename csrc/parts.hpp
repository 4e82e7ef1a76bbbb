// The split of work on arrays in host memory over threads.
//
// Included by files that every CPU of the family can run, never by a kernel of an instruction set: the linker keeps one
// copy of a template.
#pragma once

#include <algorithm>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

#include "numa.hpp"

namespace elixir {

/// The number of parts of `numel` elements: at most `threads`, and fewer where a part would be short. A thread costs
/// about 20 us to start and join; `min_per_thread` elements keep one busy for some 200 us.
inline std::size_t parts_of(std::size_t numel, int threads, std::size_t min_per_thread) {
    return std::clamp<std::size_t>(numel / min_per_thread, 1, static_cast<std::size_t>(std::max(threads, 1)));
}

/// Calls work(part, begin, end) for all parts of `numel` elements. Each part but the last runs on its own thread, on a
/// processor near the part's memory. Threads are started per call: a pool would have to survive a fork, and would save
/// little.
template <class StartOf, class AddressOf, class Work>
void in_parts(std::size_t parts, std::size_t numel, const StartOf& start_of, const AddressOf& address_of,
              const Work& work) {
    std::vector<std::jthread> others;
    others.reserve(parts - 1);
    std::size_t part = 0;
    try {
        for (; part + 1 < parts; ++part) {
            others.emplace_back([&, part, begin = start_of(part), end = start_of(part + 1)] {
                run_near(address_of(begin));
                work(part, begin, end);
            });
        }
    } catch (const std::system_error&) {
        // The system cannot start another thread: the caller's thread does the rest.
    }
    work(part, start_of(part), numel);
}

}  // namespace elixir
