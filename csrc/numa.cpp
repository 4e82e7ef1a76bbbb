// Linux only; elsewhere the node of memory is unknown. Uses system calls and files, no library.

#include "numa.hpp"

#ifdef __linux__

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>

namespace elixir {
namespace {

// MPOL_F_NODE | MPOL_F_ADDR of <numaif.h>, a header of libnuma.
constexpr unsigned long kNodeOfAddress = 1UL | 2UL;

// Calls each(first, last) for the ranges of a list such as "0-3,8".
template <class Each>
void each_range(const std::string& list, const Each& each) {
    std::istringstream ranges(list);
    for (std::string range; std::getline(ranges, range, ',');) {
        int first = 0, last = 0;
        char dash = 0;
        std::istringstream numbers(range);
        if (!(numbers >> first)) continue;
        each(first, numbers >> dash >> last ? last : first);
    }
}

std::string read_line(const std::string& path) {
    std::string line;
    std::ifstream file(path);
    std::getline(file, line);
    return line;
}

bool has_several_nodes() {
    int nodes = 0;
    each_range(read_line("/sys/devices/system/node/online"), [&](int first, int last) { nodes += last - first + 1; });
    return nodes > 1;
}

}  // namespace

int node_of(const void* address) noexcept {
    static const bool several = has_several_nodes();
    int node = -1;
    if (!several || syscall(SYS_get_mempolicy, &node, nullptr, 0UL, address, kNodeOfAddress) != 0) return -1;
    return node;
}

void run_near(const void* address) noexcept {
    const int node = node_of(address);
    cpu_set_t allowed, near;
    if (node < 0 || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    CPU_ZERO(&near);
    const std::string list = read_line("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
    each_range(list, [&](int first, int last) {
        for (int cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu) {
            if (CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &near);
        }
    });
    if (CPU_COUNT(&near) > 0) sched_setaffinity(0, sizeof near, &near);
}

}  // namespace elixir

#else

namespace elixir {

int node_of(const void*) noexcept {
    return -1;
}
void run_near(const void*) noexcept {}

}  // namespace elixir

#endif
