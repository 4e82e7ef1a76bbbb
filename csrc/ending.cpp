// The handler of std::terminate while the process exits.

#include "ending.hpp"

#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <thread>

namespace elixir {
namespace {

std::thread::id finalizing;
std::terminate_handler otherwise;

[[noreturn]] void park() {
    // An uncaught exception is a real error, and so is any termination of the finalizing thread.
    if (!std::current_exception() && std::this_thread::get_id() != finalizing) {
        for (;;) pause();
    }
    otherwise();
    std::abort();
}

}  // namespace

void park_ended_threads() {
    if (std::get_terminate() == park) return;
    finalizing = std::this_thread::get_id();
    otherwise = std::set_terminate(park);
}

}  // namespace elixir
