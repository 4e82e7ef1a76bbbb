// Memory of the device, which the host cannot touch, and memory of the host that copies can use later.
//
// Device memory is mapped twice: tensors hold addresses of a mapping without access, and tasks use the other one. Fresh
// memory is garbage, and memory that is free again is overwritten in the order of the stream that owns it. So whoever
// reads it too late, or before anything was written to it, reads NaN.

#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "streams.hpp"

namespace accelerator {

inline const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);
/// Addresses; memory is used only where something is written.
constexpr std::size_t kAddresses = std::size_t{1} << 38;
constexpr std::size_t kGranularity = 512;
constexpr int kGarbage = 0xff;

class Mapping {
  public:
    Mapping() : file_(memfd_create("accelerator", 0)) {
        TORCH_CHECK(file_ >= 0 && ftruncate(file_, kAddresses) == 0, "no memory for the device: ", strerror(errno));
        device_ = map(PROT_NONE);
        shadow_ = map(PROT_READ | PROT_WRITE);
    }
    bool contains(const void* address) const {
        return address >= device_ && static_cast<const char*>(address) < device_ + kAddresses;
    }
    char* device(std::size_t offset) const { return device_ + offset; }
    /// The same memory where it can be read and written.
    char* shadow(const void* address) const { return shadow_ + (static_cast<const char*>(address) - device_); }
    void release(std::size_t offset, std::size_t size) const {
        fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(size));
    }

  private:
    char* map(int access) const {
        void* found = mmap(nullptr, kAddresses, access, MAP_SHARED | MAP_NORESERVE, file_, 0);
        TORCH_CHECK(found != MAP_FAILED, "no addresses for the device: ", strerror(errno));
        return static_cast<char*>(found);
    }

    int file_;
    char* device_ = nullptr;
    char* shadow_ = nullptr;
};

inline Mapping& mapping() {
    static auto* one = new Mapping;
    return *one;
}

/// A caching allocator by CUDA's rules: a block belongs to the stream that was current when it was allocated, is free
/// for that stream as soon as the host drops it, and `record_stream` delays that until another stream has caught up.
class DeviceMemory final : public c10::DeviceAllocator {
  public:
    c10::DataPtr allocate(std::size_t nbytes) override {
        if (nbytes == 0) return {nullptr, nullptr, &drop, kDevice};
        const std::size_t size = (nbytes + kGranularity - 1) / kGranularity * kGranularity;
        std::lock_guard lock(mutex_);
        free_what_has_ended();
        Block* block = cached(size);
        if (block == nullptr) block = fresh(size);
        void* address = mapping().device(block->offset);
        used_[address] = block;
        stats_.allocated_bytes[kAll].increase(size);
        return {address, address, &drop, kDevice};
    }
    void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
        std::lock_guard lock(mutex_);
        auto found = used_.find(memory.get());
        if (found != used_.end() && found->second->owner != stream.id()) found->second->users.insert(stream.id());
    }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {
        streams().synchronize();
        std::lock_guard lock(mutex_);
        free_what_has_ended();
        release_cached();
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex /*device*/) override {
        std::lock_guard lock(mutex_);
        return stats_;
    }
    void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {
        std::lock_guard lock(mutex_);
        stats_.allocated_bytes[kAll].reset_accumulated();
        stats_.reserved_bytes[kAll].reset_accumulated();
    }
    void resetPeakStats(c10::DeviceIndex /*device*/) override {
        std::lock_guard lock(mutex_);
        stats_.allocated_bytes[kAll].reset_peak();
        stats_.reserved_bytes[kAll].reset_peak();
    }
    /// Free and total bytes; what the cache holds is not free.
    std::pair<std::size_t, std::size_t> memory_info() {
        std::lock_guard lock(mutex_);
        const auto reserved = static_cast<std::size_t>(stats_.reserved_bytes[kAll].current);
        return {limit_ - std::min(limit_, reserved), limit_};
    }
    std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex /*device*/) override { return memory_info(); }
    /// How many bytes the device has.
    void limit(std::size_t nbytes) {
        std::lock_guard lock(mutex_);
        limit_ = nbytes;
    }
    c10::DeleterFnPtr raw_deleter() const override { return &drop; }
    void copy_data(void* /*to*/, const void* /*from*/, std::size_t /*nbytes*/) const override {
        TORCH_CHECK(false, "the host cannot copy device memory");
    }

  private:
    static constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);

    struct Block {
        std::size_t offset;
        std::size_t size;
        std::int64_t owner;
        std::set<std::int64_t> users;
        std::vector<Mark> in_use;
    };

    static void drop(void* address);

    Block* cached(std::size_t size) {
        auto& blocks = cached_[{current_stream(), size}];
        if (blocks.empty()) return nullptr;
        Block* block = blocks.back();
        blocks.pop_back();
        return block;
    }
    Block* fresh(std::size_t size) {
        if (!fits(size)) release_cached();
        if (!fits(size)) {
            ++stats_.num_ooms;
            TORCH_CHECK_WITH(OutOfMemoryError, false, "threads: out of memory: tried to allocate ", size, " bytes of ",
                             limit_, ", of which ", stats_.reserved_bytes[kAll].current, " are in use");
        }
        TORCH_CHECK(top_ + size <= kAddresses, "threads: out of addresses");
        auto* block = new Block{top_, size, current_stream(), {}, {}};
        top_ += size;
        stats_.reserved_bytes[kAll].increase(size);
        std::memset(mapping().shadow(mapping().device(block->offset)), kGarbage, size);  // at once: nobody has used it
        return block;
    }
    bool fits(std::size_t size) const {
        return static_cast<std::size_t>(stats_.reserved_bytes[kAll].current) + size <= limit_;
    }
    void free_what_has_ended() {
        std::vector<Block*> rest;
        for (Block* block : waiting_) {
            const auto reached = [](const Mark& mark) { return mark.reached(); };
            if (std::all_of(block->in_use.begin(), block->in_use.end(), reached)) {
                block->in_use.clear();
                cache(block);
            } else {
                rest.push_back(block);
            }
        }
        waiting_.swap(rest);
    }
    void cache(Block* block) {
        overwrite(*block);
        cached_[{block->owner, block->size}].push_back(block);
    }
    static void overwrite(const Block& block) {
        char* memory = mapping().shadow(mapping().device(block.offset));
        const std::size_t size = block.size;
        streams().at(block.owner).submit([memory, size] { std::memset(memory, kGarbage, size); });
    }
    /// Gives blocks back to the system, each when its owner has caught up.
    void release_cached() {
        for (auto& [key, blocks] : cached_) {
            for (Block* block : blocks) {
                const std::size_t offset = block->offset;
                const std::size_t size = block->size;
                streams().at(block->owner).submit([offset, size] { mapping().release(offset, size); });
                stats_.reserved_bytes[kAll].decrease(size);
                delete block;
            }
            blocks.clear();
        }
    }

    std::mutex mutex_;
    std::size_t limit_ = std::size_t{8} << 30;
    std::size_t top_ = 4096;
    std::unordered_map<void*, Block*> used_;
    std::map<std::pair<std::int64_t, std::size_t>, std::vector<Block*>> cached_;
    std::vector<Block*> waiting_;
    c10::CachingDeviceAllocator::DeviceStats stats_;
};

inline DeviceMemory& device_memory() {
    static auto* one = new DeviceMemory;
    return *one;
}

inline void DeviceMemory::drop(void* address) {
    if (address == nullptr) return;
    DeviceMemory& self = device_memory();
    std::lock_guard lock(self.mutex_);
    auto found = self.used_.find(address);
    Block* block = found->second;
    self.used_.erase(found);
    self.stats_.allocated_bytes[kAll].decrease(block->size);
    for (std::int64_t user : block->users) block->in_use.push_back(end_of(streams().at(user)));
    block->users.clear();
    if (block->in_use.empty()) {
        self.cache(block);
    } else {
        self.waiting_.push_back(block);
    }
}

/// Page-locked host memory: what `pin_memory` allocates, and ranges of other memory that are registered.
class HostMemory final : public c10::Allocator {
  public:
    c10::DataPtr allocate(std::size_t nbytes) override {
        const std::size_t size =
            std::max<std::size_t>(kGranularity, (nbytes + kGranularity - 1) / kGranularity * kGranularity);
        std::lock_guard lock(mutex_);
        TORCH_CHECK(locked_ + size <= limit_, "threads: out of memory: tried to page-lock ", size, " bytes");
        auto& cached = cached_[size];
        if (cached.empty()) cached.push_back(static_cast<char*>(std::aligned_alloc(kGranularity, size)));
        char* memory = cached.back();
        cached.pop_back();
        ranges_[memory] = {size, false};
        locked_ += size;
        return {memory, memory, &drop, c10::Device(c10::DeviceType::CPU)};
    }
    /// Page-locks memory that exists; false if the host has too little.
    bool add(void* memory, std::size_t size) {
        std::lock_guard lock(mutex_);
        if (locked_ + size > limit_) return false;
        ranges_[static_cast<char*>(memory)] = {size, true};
        locked_ += size;
        return true;
    }
    void remove(void* memory) {
        std::lock_guard lock(mutex_);
        const auto found = ranges_.find(static_cast<char*>(memory));
        if (found == ranges_.end()) return;
        locked_ -= found->second.size;
        ranges_.erase(found);
    }
    /// How many more bytes the host can page-lock.
    void limit(std::size_t nbytes) {
        std::lock_guard lock(mutex_);
        limit_ = locked_ + nbytes;
    }
    bool contains(const void* address) { return find(address).has_value(); }
    /// Whether nobody but its owner keeps the memory while a copy uses it, as after `cudaHostRegister`.
    bool is_registered(const void* address) {
        const std::optional<Range> range = find(address);
        return range.has_value() && range->registered;
    }
    c10::DeleterFnPtr raw_deleter() const override { return &drop; }
    void copy_data(void* to, const void* from, std::size_t nbytes) const override {
        default_copy_data(to, from, nbytes);
    }

  private:
    struct Range {
        std::size_t size;
        bool registered;
    };

    static void drop(void* memory);

    std::optional<Range> find(const void* address) {
        std::lock_guard lock(mutex_);
        auto after = ranges_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
        if (after == ranges_.begin()) return std::nullopt;
        auto& [begin, range] = *std::prev(after);
        return static_cast<const char*>(address) < begin + range.size ? std::optional(range) : std::nullopt;
    }

    std::mutex mutex_;
    std::size_t locked_ = 0;
    std::size_t limit_ = std::size_t{1} << 40;
    std::map<char*, Range> ranges_;
    std::map<std::size_t, std::vector<char*>> cached_;
};

inline HostMemory& host_memory() {
    static auto* one = new HostMemory;
    return *one;
}

inline void HostMemory::drop(void* memory) {
    HostMemory& self = host_memory();
    std::lock_guard lock(self.mutex_);
    auto found = self.ranges_.find(static_cast<char*>(memory));
    std::memset(memory, kGarbage, found->second.size);
    self.cached_[found->second.size].push_back(found->first);
    self.locked_ -= found->second.size;
    self.ranges_.erase(found);
}

}  // namespace accelerator
